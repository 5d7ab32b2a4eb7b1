"""Exchanges objects and bytes between the ranks of a training job, and calls functions on them so
that all have the same outcome. Imports torch when called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from embedserve_store.errors import StoreError

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")

WAIT_MAX = timedelta(days=7)
"""Limit of a wait for another rank, which may publish terabytes or pull a version meanwhile. The
default of gloo, 30 minutes, ends jobs. A rank that dies ends the wait at once."""


class Ranks:
    """All ranks of the default process group, with a gloo group of their own.

    A group of its own keeps these collectives apart from those of training, which run at the same
    time in another thread, and from their time limit. Without a process group there is one rank.

    Attributes:
        rank: number of this rank.
        count: number of ranks.
        group: the group; None if there is one rank.
    """

    def __init__(self) -> None:
        """Creates the group; a collective of all ranks."""
        from torch import distributed

        is_alone = not distributed.is_initialized() or distributed.get_world_size() == 1
        self.rank = 0 if is_alone else distributed.get_rank()
        self.count = 1 if is_alone else distributed.get_world_size()
        self.group = None if is_alone else distributed.new_group(backend="gloo", timeout=WAIT_MAX)

    def from_all(self, value: Any) -> list[Any]:
        """Returns the ``value`` of each rank, on every rank; a collective."""
        if self.group is None:
            return [value]
        from torch import distributed

        values = [None] * self.count
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: Any) -> Any:
        """Returns the ``value`` of rank 0, on every rank; a collective."""
        if self.group is None:
            return value
        from torch import distributed

        values = [value]
        distributed.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def on_all(self, call: Callable[[], Result]) -> Result:
        """Calls ``call`` on every rank, and returns its result; a collective.

        If it raises on a rank, all ranks raise: their own error, else that of the first rank.
        """
        result, error = _outcome(call)
        errors = [one for one in self.from_all(error) if one is not None]
        return _checked(result, error or next(iter(errors), None))

    def on_first(self, call: Callable[[], Result]) -> Result:
        """Calls ``call`` on rank 0, and returns or raises its outcome on all; a collective."""
        first = self.from_first(_outcome(call) if self.rank == 0 else None)
        return cast(Result, _checked(*first))

    def flag_from_first(self, flag: bool) -> bool:
        """Returns the ``flag`` of rank 0, on every rank; a collective of one message.

        ``from_first`` sends an object and its size before.
        """
        if self.group is None:
            return flag
        import torch
        from torch import distributed

        sent = torch.tensor([flag], dtype=torch.uint8)
        distributed.broadcast(sent, src=0, group=self.group)
        return bool(sent.item())

    def exchange(
        self, sent: torch.Tensor, to_each: Sequence[int], from_each: Sequence[int]
    ) -> torch.Tensor:
        """Sends a part of ``sent`` to each rank, and returns what the ranks sent to this one.

        A collective, of several ranks.

        Args:
            sent: bytes, uint8 [n], on the CPU: the part of rank 0 first.
            to_each: number of bytes for each rank.
            from_each: number of bytes that each rank sends to this one.
        """
        import torch
        from torch import distributed

        received = torch.empty(sum(from_each), dtype=torch.uint8)
        distributed.all_to_all_single(
            received, sent, list(from_each), list(to_each), group=self.group
        )
        return received

    def close(self) -> None:
        """Ends the group, unless all groups have ended before; a collective."""
        from torch import distributed

        if self.group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self.group)
        self.group = None


def _outcome(call: Callable[[], Result]) -> tuple[Result | None, StoreError | None]:
    """Returns the result of ``call``, or its error, which other ranks can receive."""
    try:
        return call(), None
    except StoreError as error:
        return None, error
    except Exception as error:
        other = StoreError(f"{type(error).__name__}: {error}")
        other.__cause__ = error
        return None, other


def _checked(result: Result | None, error: StoreError | None) -> Result:
    if error is not None:
        raise error
    return cast(Result, result)

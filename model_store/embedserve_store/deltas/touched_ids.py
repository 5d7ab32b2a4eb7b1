"""Reads the ids of training's lookups from TorchRec's ModelDeltaTracker.

Each rank reads its own. Imports torch and torchrec only when called.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from embedserve_store.errors import InvalidModelError
from embedserve_store.sources.live_dmp import sharded_collections

if TYPE_CHECKING:
    import torch


class TouchedIds:
    """The ids that a sharded collection looked up in training, by table.

    TorchRec's tracker appends the ids of each lookup with the index of the batch. This class reads
    those records instead of ``get_unique_ids``, which merges the batches, raises ValueError if
    nothing was looked up, and loses what is looked up between it and the next forward.

    TorchRec records an id before the optimizer updates its row. If a pipeline looks a batch up
    ahead, the rows of its ids change only after they are recorded. Therefore the ids of the last
    ``overlap_steps`` training steps before ``mark_taken`` are returned once more after it, and as
    long as no further step follows. Forwards of an evaluation (``eval()`` or ``no_grad``) count as
    no step.
    """

    def __init__(
        self, dmp: torch.nn.Module, collection: torch.nn.Module, path: str, overlap_steps: int
    ) -> None:
        """Starts recording.

        Args:
            path: path of ``collection`` in ``dmp``, which is part of the consumer's name.

        Raises:
            InvalidModelError: TorchRec's tracker does not work for this model.
        """
        self._dmp: Any = dmp
        self._consumer = f"embedserve:{path}" if path else "embedserve"
        self._tracker = _tracker_of(dmp, self._consumer)
        self._again: dict[str, list[Any]] = {}
        self._steps = deque([self._tracker.curr_batch_idx], maxlen=overlap_steps)
        self._hook = collection.register_forward_pre_hook(self._count_step)
        try:
            self._fqns = _tracked_tables(self._tracker, dmp, collection)
        except InvalidModelError:
            self.close()
            raise

    @property
    def tables(self) -> frozenset[str]:
        """Names of the tables whose lookups are recorded completely."""
        return frozenset(self._fqns)

    def read(self) -> dict[str, torch.Tensor]:
        """Returns the ids of each table, int [n] on the model's device, unique and ascending.

        An id is the row number in this rank's shard. Tables without lookups are left out.
        """
        import torch

        found = self._recorded()
        ids = {}
        for table, fqn in self._fqns.items():
            lookups = [*self._again.get(fqn, ()), *found.get(fqn, ())]
            if lookups:
                ids[table] = torch.cat([lookup.ids for lookup in lookups]).unique()
        return {table: own for table, own in ids.items() if len(own)}

    def mark_taken(self) -> None:
        """Drops what ``read`` returned, except for the ids of the last ``overlap_steps`` steps."""
        tracker, found = self._tracker, self._recorded()
        consumers = tracker.per_consumer_batch_idx
        end = tracker.curr_batch_idx + 1
        first = self._steps[0] if self._steps else end
        if len(consumers) > 1 or tracker._auto_compact:
            # Merged batches have the index of their first. Those of the last may be among them.
            found = {fqn: [replace(one, batch_idx=end - 1) for one in found[fqn]] for fqn in found}
        self._again = {
            fqn: [
                lookup
                for lookup in (*self._again.get(fqn, ()), *found.get(fqn, ()))
                if lookup.batch_idx >= first
            ]
            for fqn in self._fqns.values()
        }
        consumers[self._consumer] = end
        # Lookups before the next forward, as those of a pipeline that begins, belong to what
        # follows: TorchRec would give them an index that was read.
        tracker.step()
        if tracker._delete_on_read:
            tracker.store.delete(up_to_idx=min(consumers.values()))

    def close(self) -> None:
        """Stops recording, unless the tracker has other consumers."""
        from torchrec.distributed.model_tracker.types import Trackers

        self._hook.remove()
        self._again = {}
        self._tracker.per_consumer_batch_idx.pop(self._consumer, None)
        if not self._tracker.per_consumer_batch_idx:
            for module in self._tracker.tracked_modules.values():
                module.post_lookup_tracker_fn = None
            self._dmp.model_trackers.pop(Trackers.DELTA_TRACKER.name, None)
            self._tracker.store.delete()

    def _recorded(self) -> dict[str, list[Any]]:
        """Returns the lookups since ``mark_taken``, by TorchRec's name of the table."""
        tracker = self._tracker
        start = tracker.per_consumer_batch_idx[self._consumer]
        lookups: dict[str, list[Any]] = tracker.store.get_indexed_lookups(
            start, tracker.curr_batch_idx + 1
        )
        return lookups

    def _count_step(self, collection: torch.nn.Module, _: Any) -> None:
        import torch

        index = self._tracker.curr_batch_idx
        if collection.training and torch.is_grad_enabled() and index not in self._steps:
            self._steps.append(index)


def _tracker_of(dmp: Any, consumer: str) -> Any:
    """Returns the delta tracker of ``dmp``, with ``consumer``; initializes it if there is none.

    Raises:
        InvalidModelError: it cannot be initialized, or has ``consumer`` already.
    """
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.model_tracker.types import DeltaTrackerConfig, TrackingMode

    if not isinstance(dmp, DistributedModelParallel):
        raise InvalidModelError(
            f"touched rows are tracked in a DistributedModelParallel, not in a {type(dmp).__name__}"
        )
    if (tracker := dmp.get_delta_tracker()) is not None:
        if consumer in tracker.per_consumer_batch_idx:
            raise InvalidModelError(
                f"TorchRec's delta tracker has the consumer {consumer!r} already: close the "
                "DeltaWriter that tracks these tables before you make another"
            )
        tracker.per_consumer_batch_idx[consumer] = -1  # the index with which TorchRec begins
        return tracker
    config = DeltaTrackerConfig(tracking_mode=TrackingMode.ID_ONLY, consumers=[consumer])
    try:
        return dmp.init_torchrec_delta_tracker(config)
    except AttributeError as error:
        if error.name != "module":
            raise
        raise InvalidModelError(
            "TorchRec's delta tracker cannot be initialized: DistributedDataParallel does not wrap "
            f"the model ({error}). Call init_data_parallel() before; if the model has no dense "
            "parameters, hold it in a torch.nn.Module as its attribute 'module', and shard that"
        ) from error


def _tracked_tables(tracker: Any, dmp: torch.nn.Module, collection: Any) -> dict[str, str]:
    """Returns TorchRec's names of those tables of ``collection`` whose lookups are all recorded.

    The tracker finds a table by the feature alone, so the lookups of a feature that several tables
    have are recorded for the first of them only.

    Raises:
        InvalidModelError: the tracker takes a table for another.
    """
    owners: dict[str, list[str]] = {}
    features: Counter[str] = Counter()
    for path, module in sharded_collections(dmp):
        for name, config in module._table_name_to_config.items():
            owners.setdefault(name, []).append(path or type(module).__name__)
            features.update(config.feature_names)
    names = Counter(tracker.table_to_fqn.values())
    tracked = {}
    for table, config in collection._table_name_to_config.items():
        if len(owners[table]) > 1:
            raise InvalidModelError(
                f"table {table!r} is in {' and in '.join(owners[table])}, which TorchRec's delta "
                "tracker takes for one: give each table a name of its own"
            )
        fqn = tracker.table_to_fqn.get(table)
        if names[fqn] > 1:
            raise InvalidModelError(
                f"table {table!r}: TorchRec's delta tracker takes it for another, as a module's "
                f"path contains the name of a table ({fqn}): rename the table or the module"
            )
        if fqn and all(features[feature] == 1 for feature in config.feature_names):
            tracked[table] = fqn
    return tracked

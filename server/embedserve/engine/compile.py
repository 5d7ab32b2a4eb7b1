"""Compiles a sharded model into one lookup: plain tensors in, one matrix out.

Down to tensor operations where that is possible (trace.py); else tracing and scripting torchrec's
modules removes the Python between them. A model that cannot be compiled is looked up through
the eager module: slower, same answers.
"""

# No "from __future__ import annotations": TorchScript reads the annotations below.
import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.jit import _recursive, _state
from torchrec.fx import Tracer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embedserve.engine.kernel_rows import (
    KernelTables,
    Rows,
    detach_weights,
    kernels_of,
    stood_in_for,
)
from embedserve.engine.trace import id_dtype, trace, with_inputs

logger = logging.getLogger(__name__)

KERNEL = "IntNBitTableBatchedEmbeddingBagsCodegen"

Lookup = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(ids int64 [n], lengths int32 [F * B], weights float32 [n] or None) -> float32 [B, sum(dims)],
or, of an unpooled model, [N, dim]: for each key one row for each id of its feature. One that takes
offsets is given these in place of the lengths, int32 [F * B + 1], and ids as int32: as kernels on
GPUs read them, so that nothing has to be made of them there."""


@torch.fx.wrap
def _to_kjt(
    keys: list[str],
    ids: torch.Tensor,
    bags: torch.Tensor,
    weights: torch.Tensor | None,
    takes_offsets: bool,
) -> KeyedJaggedTensor:
    if takes_offsets:
        return KeyedJaggedTensor(keys=keys, values=ids, offsets=bags, weights=weights)
    return KeyedJaggedTensor(keys=keys, values=ids, lengths=bags, weights=weights)


TRACED, SCRIPTED, EAGER = "traced", "scripted", "eager"
"""How a lookup runs, the fastest first: as a trace's tensor operations, as torchrec's modules in
TorchScript, or as these modules in Python."""
KINDS = (TRACED, SCRIPTED, EAGER)


class TensorLookup(nn.Module):
    """A sharded collection from tensors to a tensor whose columns follow ``keys``.

    The order of torchrec's answer depends on the plan, and rows may be stored wider than they are;
    here the blocks are put back, as wide as ``dims`` (of each key) says: piece by piece, or where
    there are gaps between pieces column by column, which takes 3 us for 8 of 10 columns each and
    one example, where these pieces take 28.
    """

    def __init__(
        self,
        sharded: nn.Module,
        features: Sequence[str],
        keys: Sequence[str],
        dims: Sequence[int],
        device: torch.device,
        *,
        takes_offsets: bool = False,
    ) -> None:
        super().__init__()
        self.sharded = sharded
        self.features = list(features)
        self.takes_offsets = takes_offsets
        starts, self.width = self._answer_to_nothing(device)
        pieces = [(starts[key], dim) for key, dim in zip(keys, dims, strict=True)]
        self.pieces = _joined(pieces)
        self.has_gaps = sum(dims) < self.width
        columns = [column for start, dim in pieces for column in range(start, start + dim)]
        self.columns: torch.Tensor
        self.register_buffer("columns", torch.tensor(columns, device=device))

    def _answer_to_nothing(self, device: torch.device) -> tuple[dict[str, int], int]:
        """Where the columns of each key begin in torchrec's answer, and how many it has. torchrec
        creates its input and output modules at the first call, on its device."""
        features, takes_offsets = self.features, self.takes_offsets
        ids = torch.zeros(0, dtype=id_dtype(takes_offsets), device=device)
        bags = torch.zeros(len(features) + takes_offsets, dtype=torch.int32, device=device)
        weights = torch.zeros(0, device=device)
        with torch.inference_mode():
            answer = self.sharded(_to_kjt(features, ids, bags, weights, takes_offsets))
        ends = list(accumulate(answer.length_per_key()))
        return dict(zip(answer.keys(), [0, *ends], strict=False)), ends[-1]

    def forward(
        self, ids: torch.Tensor, bags: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        kjt = _to_kjt(self.features, ids, bags, weights, self.takes_offsets)
        values: torch.Tensor = self.sharded(kjt).values()
        if self.pieces == [(0, self.width)]:
            return values
        if self.has_gaps:
            return values.index_select(1, self.columns)
        return torch.cat([values.narrow(1, start, count) for start, count in self.pieces], dim=1)


def _joined(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, count) of columns one after the other, in as few pieces as there can be."""
    joined: list[tuple[int, int]] = []
    for start, count in pieces:
        if joined and sum(joined[-1]) == start:
            start, count = joined[-1][0], joined.pop()[1] + count
        joined.append((start, count))
    return joined


@torch.fx.wrap
def _whole(slices: list[torch.Tensor]) -> torch.Tensor:
    rows = 0
    for one in slices:
        rows += one.size(0)
    return slices[0].as_strided([rows, slices[0].size(1)], [slices[0].size(1), 1])


class RowLookup(nn.Module):
    """A sharded EmbeddingCollection from tensors to its rows, key after key. Without weights.

    torchrec answers with slices of what its kernels or its un-permuting wrote. Where those
    already follow one another in the order of ``keys``, the whole is answered without copying,
    unless rows are stored wider than ``dim``.
    """

    def __init__(
        self,
        sharded: nn.Module,
        features: Sequence[str],
        keys: Sequence[str],
        dim: int,
        device: torch.device,
        *,
        takes_offsets: bool = False,
    ) -> None:
        super().__init__()
        self.sharded = sharded
        self.features = list(features)
        self.takes_offsets = takes_offsets
        self.keys = list(keys)
        self.dim = dim
        # One id for each feature also makes torchrec create its input and output modules.
        ids = torch.zeros(len(features), dtype=id_dtype(takes_offsets), device=device)
        bags = torch.ones(len(features), dtype=torch.int32, device=device)
        if takes_offsets:
            bags = torch.arange(len(features) + 1, dtype=torch.int32, device=device)
        with torch.inference_mode():
            slices = self._slices(ids, bags)
        self.is_whole = _follow_one_another(slices)
        self.is_wide = slices[0].size(1) > dim

    def _slices(self, ids: torch.Tensor, bags: torch.Tensor) -> list[torch.Tensor]:
        answer = self.sharded(_to_kjt(self.features, ids, bags, None, self.takes_offsets))
        return [answer[key].values() for key in self.keys]

    def forward(
        self, ids: torch.Tensor, bags: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        slices = self._slices(ids, bags)
        rows = _whole(slices) if self.is_whole else torch.cat(slices)
        return rows.narrow(1, 0, self.dim).contiguous() if self.is_wide else rows


def _follow_one_another(slices: list[torch.Tensor]) -> bool:
    """Whether ``slices`` cut one tensor into pieces, from its start on."""
    storage = slices[0].untyped_storage().data_ptr()
    end = 0
    for one in slices:
        follows = one.untyped_storage().data_ptr() == storage and one.storage_offset() == end
        if not (follows and one.is_contiguous()):
            return False
        end += one.numel()
    return True


@dataclass(frozen=True)
class Program:
    """A compiled lookup without its rows: that of every version of one layout.

    Attributes:
        kind: TRACED, or SCRIPTED.
        run: traced, it takes the rows of each kernel and where its tables begin in them, then
            (ids, lengths), or (ids, lengths, weights); scripted, (ids, lengths, weights) and then
            the rows of each kernel, whose tables begin where they did.
        kernels: the shards of tables that each kernel reads.
        unit: the compilation unit that has the classes of what was scripted, which ``run`` does not
            keep alive.
    """

    kind: str
    run: Callable[..., torch.Tensor]
    is_weighted: bool
    kernels: tuple[KernelTables, ...]
    unit: object

    def over(self, rows: Sequence[Rows]) -> Lookup:
        """The lookup in ``rows``, of each kernel."""
        run = self.run
        if self.kind == SCRIPTED:
            data = [one for one, _ in rows]
            return lambda ids, lengths, weights: run(ids, lengths, weights, *data)
        given = partial(run, *(tensor for one in rows for tensor in one))
        return given if self.is_weighted else lambda ids, lengths, weights: given(ids, lengths)


@dataclass(frozen=True)
class Compiled:
    """A lookup, and how it runs.

    Attributes:
        kind: one of KINDS.
        program: of which it is made, where it can be given other rows.
        rows: that it was given, of each kernel.
    """

    lookup: Lookup
    kind: str
    program: Program | None = None
    rows: tuple[Rows, ...] = ()

    @classmethod
    def of(cls, program: Program, rows: Sequence[Rows]) -> Self:
        return cls(program.over(rows), program.kind, program, tuple(rows))


@contextlib.contextmanager
def own_compilation_unit() -> Iterator[None]:
    """Has TorchScript keep what is compiled within this block in a compilation unit of its own.

    The unit of the process is never emptied: each layout would add its classes and functions to it.
    One of its own is freed with the programs that were compiled in it. TorchScript finds the unit,
    and what it knows of it, by these names; no other thread may compile meanwhile.
    """
    unit = torch._C.CompilationUnit()
    own: list[tuple[Any, str, object]] = [
        (_state, "_python_cu", unit),
        (_recursive, "_python_cu", unit),
        (_state, "_jit_caching_layer", WeakKeyDictionary()),
        (_state, "_jit_function_overload_caching", WeakKeyDictionary()),
        (_state, "_script_classes", {}),
        (_state, "_name_to_pyclass", {}),
        (_recursive, "concrete_type_store", _recursive.ConcreteTypeStore()),
    ]
    shared = [(module, name, getattr(module, name)) for module, name, _ in own]
    for module, name, value in own:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in shared:
            setattr(module, name, value)


def compile_lookup(
    lookup: TensorLookup | RowLookup, device: torch.device, *, ranks: int, is_weighted: bool
) -> Compiled:
    """``lookup`` traced or scripted, or as it is where both fail (logged).

    Args:
        device: where its batches are.
        ranks: over how many its tables are sharded. Ids that are split among several are another
            trace for each batch, and trying takes as long as scripting.
        is_weighted: whether it is called with weights, always, or never.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit's own deprecations
        try:
            if ranks == 1:
                traced = trace(
                    lookup,
                    len(lookup.features),
                    device,
                    is_weighted=is_weighted,
                    takes_offsets=lookup.takes_offsets,
                )
                if traced is not None:
                    return _compiled(TRACED, traced, lookup, is_weighted)
            return _scripted(lookup, is_weighted)
        except Exception as error:  # anything: torch names no type for what it cannot compile
            logger.warning("lookups run eagerly, TorchScript failed: %s", str(error)[:500])
            return Compiled(lookup, EAGER)


def _compiled(
    kind: str,
    run: Callable[..., torch.Tensor],
    lookup: TensorLookup | RowLookup,
    is_weighted: bool,
) -> Compiled:
    kernels = kernels_of(lookup)
    sharded: Any = lookup.sharded
    configs = sharded.tbes_configs()
    tables = [KernelTables(configs[one], tuple(one.feature_table_map)) for one in kernels]
    program = Program(kind, run, is_weighted, tuple(tables), _state._python_cu)
    return Compiled.of(program, detach_weights(kernels))


def _scripted(lookup: TensorLookup | RowLookup, is_weighted: bool) -> Compiled:
    """Frozen, attributes are constants, and much of what torchrec asks of its batches is known
    beforehand: a third less time. Rows are to be no constants, which live as long as what was
    compiled: it is compiled over stand-ins for them, which are made its inputs then."""
    graph = Tracer(leaf_modules=[KERNEL]).trace(lookup)
    module = torch.fx.GraphModule(lookup, graph).eval()
    kernels = kernels_of(lookup)
    with stood_in_for(kernels) as stand_ins:
        run = with_inputs(torch.jit.freeze(torch.jit.script(module)), stand_ins)
    if run is not None:
        return _compiled(SCRIPTED, run, lookup, is_weighted)
    return Compiled(torch.jit.freeze(torch.jit.script(module)), SCRIPTED)

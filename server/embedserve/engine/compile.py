"""Compiles a sharded model into one lookup that takes plain tensors and returns one matrix.

The lookup is traced down to tensor operations if possible (trace.py). Otherwise torchrec's modules
are traced by torch.fx and scripted, which removes the Python between them. A model that cannot be
compiled uses the eager module, which is slower and returns the same results.
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
"""Signature of a lookup: (ids int64 [n], lengths int32 [F * B], weights float32 [n] or None) ->
float32 [B, sum(dims)]. For an unpooled model the result is [N, dim]: for each key one row per id of
its feature. A lookup that takes offsets gets them in place of the lengths, int32 [F * B + 1], and
ids as int32. GPU kernels read these, so that nothing has to be converted on the GPU."""


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
    """A sharded collection as a function from tensors to one tensor, whose columns follow ``keys``.

    The column order of torchrec's result depends on the plan, and rows may be stored wider than
    their keys. This module restores the order of ``keys``, with the width of each key from
    ``dims``. It concatenates blocks, or selects single columns if there are gaps between the
    blocks. Selecting takes 3 us for 8 features of 10 columns each and one example; concatenating
    their blocks takes 28 us.
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
        starts, self.width = self._result_columns(device)
        blocks = [(starts[key], dim) for key, dim in zip(keys, dims, strict=True)]
        self.blocks = _merge_adjacent(blocks)
        self.has_gaps = sum(dims) < self.width
        columns = [column for start, dim in blocks for column in range(start, start + dim)]
        self.columns: torch.Tensor
        self.register_buffer("columns", torch.tensor(columns, device=device))

    def _result_columns(self, device: torch.device) -> tuple[dict[str, int], int]:
        """Returns the first column of each key in torchrec's result, and the result's width.
        torchrec creates its input and output modules at the first call, on its device."""
        features, takes_offsets = self.features, self.takes_offsets
        ids = torch.zeros(0, dtype=id_dtype(takes_offsets), device=device)
        bags = torch.zeros(len(features) + takes_offsets, dtype=torch.int32, device=device)
        weights = torch.zeros(0, device=device)
        with torch.inference_mode():
            result = self.sharded(_to_kjt(features, ids, bags, weights, takes_offsets))
        ends = list(accumulate(result.length_per_key()))
        return dict(zip(result.keys(), [0, *ends], strict=False)), ends[-1]

    def forward(
        self, ids: torch.Tensor, bags: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        kjt = _to_kjt(self.features, ids, bags, weights, self.takes_offsets)
        values: torch.Tensor = self.sharded(kjt).values()
        if self.blocks == [(0, self.width)]:
            return values
        if self.has_gaps:
            return values.index_select(1, self.columns)
        return torch.cat([values.narrow(1, start, count) for start, count in self.blocks], dim=1)


def _merge_adjacent(blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns ``blocks`` of columns, (start, count) each, with adjacent blocks merged."""
    merged: list[tuple[int, int]] = []
    for start, count in blocks:
        if merged and sum(merged[-1]) == start:
            start, count = merged[-1][0], merged.pop()[1] + count
        merged.append((start, count))
    return merged


@torch.fx.wrap
def _whole(slices: list[torch.Tensor]) -> torch.Tensor:
    rows = 0
    for one in slices:
        rows += one.size(0)
    return slices[0].as_strided([rows, slices[0].size(1)], [slices[0].size(1), 1])


class RowLookup(nn.Module):
    """A sharded EmbeddingCollection as a function from tensors to its rows, key after key. It
    ignores weights.

    torchrec returns slices of the output of its kernels or of its un-permuting. If the slices
    already follow one another in the order of ``keys``, their whole tensor is returned without a
    copy. Rows stored wider than ``dim`` are always copied.
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
        # A call with one id per feature also makes torchrec create its input and output modules.
        ids = torch.zeros(len(features), dtype=id_dtype(takes_offsets), device=device)
        bags = torch.ones(len(features), dtype=torch.int32, device=device)
        if takes_offsets:
            bags = torch.arange(len(features) + 1, dtype=torch.int32, device=device)
        with torch.inference_mode():
            slices = self._slices(ids, bags)
        self.is_whole = _follow_one_another(slices)
        self.is_wide = slices[0].size(1) > dim

    def _slices(self, ids: torch.Tensor, bags: torch.Tensor) -> list[torch.Tensor]:
        result = self.sharded(_to_kjt(self.features, ids, bags, None, self.takes_offsets))
        return [result[key].values() for key in self.keys]

    def forward(
        self, ids: torch.Tensor, bags: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        slices = self._slices(ids, bags)
        rows = _whole(slices) if self.is_whole else torch.cat(slices)
        return rows.narrow(1, 0, self.dim).contiguous() if self.is_wide else rows


def _follow_one_another(slices: list[torch.Tensor]) -> bool:
    """Returns whether ``slices`` are consecutive views of one tensor, from its start on."""
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
    """A compiled lookup without its rows, shared by all versions of one layout.

    Attributes:
        kind: TRACED or SCRIPTED.
        run: compiled function. If traced, it takes each kernel's rows and table offsets, then (ids,
            lengths) or (ids, lengths, weights). If scripted, it takes (ids, lengths, weights), then
            each kernel's rows, whose table offsets are fixed.
        kernels: table shards that each kernel reads.
        unit: compilation unit with the classes of the scripted code, which ``run`` does not keep
            alive.
    """

    kind: str
    run: Callable[..., torch.Tensor]
    is_weighted: bool
    kernels: tuple[KernelTables, ...]
    unit: object

    def over(self, rows: Sequence[Rows]) -> Lookup:
        """Returns the lookup over ``rows``, which are given for each kernel."""
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
        program: program of the lookup, if it can be given other rows.
        rows: rows of each kernel that the lookup was given.
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
    """Makes TorchScript put everything compiled within its block into a separate compilation unit.

    The unit of the process is never emptied, so each layout would add its classes and functions to
    it. A separate unit is freed with the programs compiled in it. TorchScript finds the unit, and
    its caches, by these names. No other thread may compile meanwhile.
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
    """Returns ``lookup`` traced or scripted, or unchanged if both fail (logged).

    Args:
        device: device of the batches.
        ranks: number of ranks over which the tables are sharded. Ids split among several ranks give
            a different trace for each batch, and trying takes as long as scripting.
        is_weighted: whether the lookup is always called with weights; otherwise it never is.
    """
    # On CPUs, code that is compiled for the shapes of the first calls is no faster. It would take
    # 0.2 s and 7 MB more for each lookup of several ranks.
    torch._C._jit_set_profiling_mode(device.type != "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hides torch.jit's own deprecation warnings
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
        except Exception as error:  # torch documents no exception type for failed compilation
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
    """Scripts and freezes ``lookup``.

    Freezing turns attributes into constants, and precomputes much of what torchrec derives from its
    batches, which saves a third of the time. Rows must not become constants, which would live as
    long as the compiled code. The lookup is therefore compiled over stand-ins for the rows, which
    then become its inputs.
    """
    graph = Tracer(leaf_modules=[KERNEL]).trace(lookup)
    module = torch.fx.GraphModule(lookup, graph).eval()
    kernels = kernels_of(lookup)
    with stood_in_for(kernels) as stand_ins:
        run = with_inputs(_frozen(module), stand_ins)
    if run is not None:
        return _compiled(SCRIPTED, run, lookup, is_weighted)
    return Compiled(_frozen(module), SCRIPTED)


def _frozen(module: nn.Module) -> Any:
    """Scripts and freezes ``module``, which has no convolution or linear layer to fold."""
    return torch.jit.freeze(torch.jit.script(module), optimize_numerics=False)

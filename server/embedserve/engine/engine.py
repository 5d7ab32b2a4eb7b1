"""The engine: takes (row numbers, lengths, weights) of one batch, returns vectors.

Holds the lookups compiled from one model version's DistributedModelParallel, and the rows. Its
inputs and results are numpy arrays; torch stays inside. It does not validate its input, which the
batcher has validated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from embedserve.batching.lookup_engine import RemoteLookups
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.shared_goldens import LiveGoldens
from embedserve.engine.compile import KINDS, Compiled
from embedserve.engine.device_batches import DeviceBatches
from embedserve.engine.gpu_spare_rows import GpuSpareRows
from embedserve.engine.pooled_values import divide_means, to_float16
from embedserve.engine.replicas import Replicas
from embedserve.engine.sharded import main_device
from embedserve_store.errors import StoreError
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import CODES_MAX
from embedserve_store.goldens.goldens_file import Goldens
from embedserve_store.goldens.parity import check_answers
from embedserve_store.goldens.reference_pooling import row_numbers
from embedserve_store.ids.translate import IdTranslator
from embedserve_store.model_version import ModelVersion
from embedserve_store.plans.plan import Plan

WARM_UP_CALLS = 4
"""Lookups that warm up an engine. TorchScript compiles at the first call of a lookup on a CPU, and
profiles the first two on a GPU."""


@dataclass(frozen=True)
class _Golden:
    """The version's goldens as arguments of a lookup, and the result of each replica."""

    numbers: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None
    results: tuple[np.ndarray, ...]


class Engine:
    """One restored model version.

    Attributes:
        manifest: manifest of the served version; that of its part, if only one is served.
        fingerprint: fingerprint of the published version.
        part: the part of the published version that is served; None for all of it.
        table_offsets: offset of each table in its mapping, in bytes.
        translator: translator of callers' ids into the row numbers that lookups take.
        plan: plan as restored; not the stored plan if ``replanned``.
        device_type: cpu or cuda.
        waits_for_device: whether lookups run on another device, as defined by
            batching.lookup_engine.LookupEngine; True on GPUs.
        replicas: number of copies of the rows, as defined there; each copy has all ranks of the
            plan.
        compiled: compiled lookups of all replicas in order; a pooled model has a plain and a
            weighted lookup in each replica.
        remote: None, as defined there: this host looks up.
        local_tables: none, as defined by fanout.router_engine.RouterEngine.
        rows_reader: reader of changed rows, set by whoever serves deltas; the engine itself does
            not use it.
        live_goldens: goldens of the last delta, set likewise; ``check`` compares them.
        spare_rows: room for changed rows on the GPU; None elsewhere, or if no row changes.
        lookup_kind: the slowest kind among ``compiled``, one of compile.KINDS.
    """

    local_tables: tuple[str, ...] = ()

    def __init__(
        self,
        version: ModelVersion,
        plan: Plan,
        device_type: str,
        compiled: Sequence[Sequence[Compiled]],
        spare_rows: GpuSpareRows | None = None,
    ) -> None:
        """
        Args:
            compiled: compiled lookups of each replica; on the CPU there is one replica.
            spare_rows: room for changed rows on the GPU, if they change there.
        """
        self.manifest: Manifest = version.manifest
        self.fingerprint = version.whole.fingerprint
        self.part = version.part
        self.table_offsets = version.tables.offsets
        self.translator: IdTranslator = version.translator
        self.plan = plan
        self.device_type = device_type
        self.waits_for_device = device_type == "cuda"
        self.remote: RemoteLookups | None = None
        self.rows_reader: RowsReader | None = None
        self.spare_rows = spare_rows
        self.live_goldens: LiveGoldens | None = None
        self.replicas = len(compiled)
        self.compiled = tuple(one for replica in compiled for one in replica)
        self.lookup_kind = max((one.kind for one in self.compiled), key=KINDS.index)
        self.replanned = plan is not version.plan
        self._version = version
        self._lookup = self.compiled[0].lookup
        self._weighted_lookup = self.compiled[1].lookup if self.manifest.is_pooled else None
        self._on_gpus: Replicas | None = None
        if device_type == "cuda":
            self._on_gpus = Replicas(
                [
                    DeviceBatches(
                        self.manifest,
                        main_device(device_type, number * plan.world_size),
                        plan.world_size,
                        *(one.lookup for one in replica),
                    ).lookup
                    for number, replica in enumerate(compiled)
                ]
            )
        self._golden: _Golden | None = None
        self._means = [c for c in self.manifest.columns if c.table.pooling == "mean"]

    @property
    def runs_modules(self) -> bool:
        """Whether a lookup runs through a torch module instead of a function compiled from
        it."""
        return any(one.program is None for one in self.compiled)

    @property
    def rounds_codes(self) -> bool:
        """Whether lookups dequantize int8 or int4 rows in float16, as CUDA kernels do. The
        results may then differ by more than the bounds of a delta's goldens."""
        on_gpu = self.device_type == "cuda"
        return on_gpu and any(table.dtype in CODES_MAX for table in self.manifest.tables)

    def lookup(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        as_float16: bool = False,
    ) -> np.ndarray:
        """Returns the rows of ``ids``, pooled if the model pools; see LookupEngine.lookup."""
        look_up = self._lookup if weights is None else self._weighted_lookup
        if look_up is None:
            raise ValueError("rows that are not pooled have no weights")
        if self._on_gpus is not None:
            return self._on_gpus.lookup(ids, lengths, weights, as_float16)
        with torch.inference_mode():
            flat = None if weights is None else torch.from_numpy(weights)
            result = look_up(torch.from_numpy(ids), torch.from_numpy(lengths), flat)
            values: np.ndarray = result.numpy()
        if self._means:
            divide_means(values, lengths, self._means)
        return self.to_float16(values) if as_float16 else values

    def to_float16(self, values: np.ndarray) -> np.ndarray:
        """Returns ``values`` rounded to float16; see pooled_values.to_float16."""
        return to_float16(values)

    def goldens(self) -> Goldens:
        """Returns the goldens of the version. Raises StoreError if the file has changed since it
        was published."""
        return self._version.goldens()

    def each(self) -> list[Callable[..., np.ndarray]]:
        """Returns the ``lookup`` of each replica."""
        return [self.lookup] if self._on_gpus is None else list(self._on_gpus.each)

    def warm_up(self) -> None:
        """Looks up the version's goldens until the lookups are compiled, and compares the results.
        Each replica is warmed up and compared.

        Raises:
            StoreError: a result differs from the published result, so the served rows are not the
                published rows.
        """
        version = self._version
        goldens = self.goldens()
        bags = goldens.bags
        numbers = row_numbers(bags, self.translator)
        lengths = bags.lengths.reshape(-1)
        all_weights: list[np.ndarray | None] = [None]
        if self.manifest.is_pooled:
            ones = np.ones(bags.ids.size, np.float32)
            all_weights.append(ones if bags.weights is None else bags.weights)
        results = []
        for lookup in self.each():
            for _ in range(WARM_UP_CALLS):
                by_weights = [lookup(numbers, lengths, weights) for weights in all_weights]
            results.append(by_weights[0 if bags.weights is None else 1])
            check_answers(
                results[-1],
                goldens,
                numbers,
                self.manifest,
                version.tables,
                str(version.path),
                as_float16=self.device_type == "cuda",  # as FBGEMM dequantizes on CUDA
            )
        self._golden = _Golden(numbers, lengths, bags.weights, tuple(results))

    def check(self) -> None:
        """Checks that published rows are as they were at warm-up, and changed rows as in training.

        Raises:
            StoreError: the file of the rows was changed, or the goldens of the version or of the
                last delta give another result.
        """
        self._version.tables.check_unchanged()
        if self.live_goldens is not None:
            self.live_goldens.check(self.lookup)
        golden = self._golden
        assert golden is not None  # warm_up has set it
        for lookup, before in zip(self.each(), golden.results, strict=True):
            result = lookup(golden.numbers, golden.lengths, golden.weights)
            if not np.array_equal(result, before, equal_nan=True):
                raise StoreError(
                    f"{self._version.path}: rows have changed since the start: its goldens are "
                    "answered otherwise now"
                )

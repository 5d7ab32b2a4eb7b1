"""Tests of the fuzzer: it finds nothing in a few seconds, and would find faults."""

import time
from pathlib import Path
from random import Random

import numpy as np
from fuzz.corpus import IDS, kinds
from fuzz.fuzz import RIGHT_EVERY, fuzz, print_table
from fuzz.mutate import MUTATIONS, mutated
from fuzz.store_files import fuzz_store, publish
from hostile.target_server import table

SECONDS = 600
"""Time limit in seconds, longer than the inputs take even if other work has the cores."""
INPUTS = 3000
STORE_INPUTS = 200


def test_malformed_requests_affect_no_other_request(tmp_path: Path) -> None:
    report = fuzz(tmp_path, seconds=SECONDS, inputs_max=INPUTS, seed=1)
    print_table(report)
    assert report.wrong == []
    assert report.sent.total() >= INPUTS
    assert report.right.total() == report.sent.total() // RIGHT_EVERY
    for outcomes in report.outcomes.values():
        assert outcomes["200"] + outcomes["grpc 0"]


def test_every_changed_byte_of_a_store_is_detected(tmp_path: Path) -> None:
    end_s = time.monotonic() + SECONDS
    changed = fuzz_store(publish(tmp_path), end_s, STORE_INPUTS, Random(1))
    assert set(changed) == {
        *("goldens.safetensors", "manifest.json", "plan.json", "tables.safetensors")
    }


def test_seed_inputs_are_reproducible_by_number() -> None:
    for kind in kinds(table()):
        for seed in kind.seeds:
            changed = [mutated(Random(i), seed, kind.seeds) for i in range(50)]
            assert seed not in changed
            assert changed == [mutated(Random(i), seed, kind.seeds) for i in range(50)]


def test_every_mutation_accepts_any_bytes() -> None:
    for mutation in MUTATIONS:
        for data in (b"x", b"1", bytes(300)):
            assert isinstance(mutation(Random(3), data, [data]), bytes)


def test_expected_results_belong_to_the_ids() -> None:
    rows = table()
    expected = {kind.expected for kind in kinds(rows)}
    assert rows[list(IDS)].astype("<f4").tobytes() in expected
    assert len(expected) == 3
    assert not np.array_equal(rows[IDS[0]], rows[IDS[1]])

"""Tests of the stages of a request: they follow each other without a gap, up to the last one
reached."""

import pytest

from embedserve.tracing.record import STAGES, StageTimings

STAGE_STARTS_S = (10.0, 10.001, 10.003, 10.006, 10.01)


@pytest.mark.parametrize("count", range(1, 6))
def test_stage_timings_add_up_to_the_total(count: int) -> None:
    times = StageTimings(STAGE_STARTS_S[:count], 10.015)
    stages = times.stages()
    assert [name for name, _, _ in stages] == list(STAGES[:count])
    assert [begin_s for _, begin_s, _ in stages] == list(STAGE_STARTS_S[:count])
    assert [end_s for _, _, end_s in stages] == [*STAGE_STARTS_S[1:count], 10.015]
    *lengths, total = times.milliseconds().values()
    assert sum(lengths) == pytest.approx(total) == pytest.approx(15)


def test_server_timing_is_in_milliseconds() -> None:
    assert StageTimings(STAGE_STARTS_S, 10.015).server_timing() == (
        b"read;dur=1, queue;dur=2, lookup;dur=3, encode;dur=4, write;dur=5, total;dur=15"
    )

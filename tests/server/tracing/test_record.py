"""Tests of the record of a request: its stages, which follow each other without a gap, and what the
log says of it."""

import pytest

from embedserve.tracing.record import STAGES, RequestRecord, StageTimings
from embedserve.tracing.trace_context import TraceContext

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


def test_log_fields_have_the_trace_id_and_no_empty_values() -> None:
    trace = TraceContext("ab" * 16, "cd" * 8, is_sampled=False)
    record = RequestRecord("x", "rest", "OK", StageTimings((10.0,), 10.002), "shop", trace=trace)
    assert record.fields() == {
        "request_id": "x",
        "trace_id": "ab" * 16,
        "protocol": "rest",
        "model": "shop",
        "outcome": "OK",
        "read_ms": 2.0,
        "total_ms": 2.0,
    }
    record.trace, record.version = None, 7
    fields = record.fields()
    assert "trace_id" not in fields
    assert fields["version"] == 7

"""Tests of `embedserve shadow`: if batches could not be compared, it says where to find the
reason."""

import pytest
from prometheus_client.samples import Sample

from embedserve.commands import shadow
from embedserve.commands.running_server import ServerClient


@pytest.mark.parametrize(
    ("failed", "message"), [(0, "0 failed, "), (3, "3 failed (the server's log says why), ")]
)
def test_failed_batches_point_to_the_server_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failed: int, message: str
) -> None:
    labels = {"model": "m", "alias": "canary", "version": "2", "against": "1"}
    samples = [
        Sample(f"{shadow.PREFIX}batches_total", {**labels, "outcome": outcome}, value)
        for outcome, value in (("compared", 1.0), ("failed", float(failed)))
    ]
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(shadow, "read_samples", lambda *_: samples)
    shadow.show_shadows(ServerClient("http://localhost"))
    assert f"m@canary version 2 against 1: 1 batches compared, 0 skipped, {message}" in " ".join(
        capsys.readouterr().out.split()
    )

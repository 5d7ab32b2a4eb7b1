"""What a server says of its models when it is ready."""

from __future__ import annotations

from dataclasses import replace

import pytest
from server.fake_models import model_info

from embedserve.config import ServeSettings
from embedserve.processes.announcement import say_ready_to_serve
from embedserve.processes.ports import SharedPorts


@pytest.mark.parametrize(
    ("replicas", "said"),
    [(1, ": 3 tables over 1 cuda rank ("), (4, ": 4 replicas of 3 tables over 1 cuda rank (")],
)
def test_replicas_are_told(capsys: pytest.CaptureFixture[str], replicas: int, said: str) -> None:
    model = replace(model_info(), device_type="cuda", replicas=replicas, example={"user": [[1]]})
    ports = SharedPorts("127.0.0.1", 8000, 8001, -1, ())
    say_ready_to_serve([model], ports, 1.0, ServeSettings(store=""))
    assert said in " ".join(capsys.readouterr().err.split())

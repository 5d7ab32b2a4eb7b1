"""Tests of both ports with h2spec, the conformance tests of RFC 9113 and RFC 7541.

Its binary is not part of the project. Without shared/tools/h2spec beside the checkout these tests
are skipped.
"""

import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hostile.conftest import Victim

H2SPEC = Path(__file__).parents[3] / "shared/tools/h2spec"
RUN_S_MAX = 240
ANSWER_S_MAX = 8
"""Timeout of each case in whole seconds. A case passes as soon as the server acts; the server
waits up to 10 s for headers."""
CASES = 146
STRICT_CASES = 147

pytestmark = pytest.mark.skipif(not H2SPEC.exists(), reason=f"there is no {H2SPEC}")


def failures(port: int, report: Path, *options: str) -> tuple[int, set[str]]:
    """Runs h2spec; returns (number of cases, failed cases)."""
    where = ("-h", "127.0.0.1", "-p", str(port), "-P", "/health/live", "-o", str(ANSWER_S_MAX))
    subprocess.run(
        [H2SPEC, *where, "-j", report, *options],
        capture_output=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = {f"{case.get('package')}: {case.get('classname')}" for case in cases if len(case)}
    return len(cases), failed


@pytest.fixture(params=["http", "grpc"])
def port(request: pytest.FixtureRequest, victim: Victim) -> int:
    return victim.http_port if request.param == "http" else victim.grpc_port


def test_every_h2spec_case_passes(port: int, tmp_path: Path) -> None:
    assert failures(port, tmp_path / "report.xml") == (CASES, set())


def test_every_strict_h2spec_case_passes(port: int, tmp_path: Path) -> None:
    assert failures(port, tmp_path / "report.xml", "-S") == (STRICT_CASES, set())

"""Tests of the systemd unit: it fits the command, its settings and the page that quotes it."""

import re
import shutil
import subprocess
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from documents import ROOT, blocks

from embedserve.config import ServeSettings
from embedserve.processes.startup.descriptors import RESERVED
from embedserve.processes.supervisor import KILL_AFTER_S

from .test_settings import KNOWN

UNIT = ROOT / "deploy" / "systemd" / "embedserve.service"
PAGE = ROOT / "docs" / "install.md"
SETTINGS = {name.removeprefix("EMBEDSERVE_").lower() for name in KNOWN}
DEFAULTS = ServeSettings(store="store")
BREAKS_THE_SERVER = {
    "MemoryDenyWriteExecute",  # FBGEMM compiles kernels
    "PrivateDevices",  # hides GPUs
    "ProtectClock",  # hides GPUs
    "WatchdogSec",  # the server sends no WATCHDOG=1
    "PrivateUsers",  # the store's groups would differ from the host's
}


def service() -> dict[str, list[str]]:
    """Returns the settings of [Service]: each name with its values."""
    (section,) = re.findall(r"^\[Service\]\n(.*?)^\[", UNIT.read_text(), re.MULTILINE | re.DOTALL)
    found = defaultdict(list)
    for line in filter(None, section.splitlines()):
        name, _, value = line.partition("=")
        found[name].append(value)
    return dict(found)


def quoted(language: str) -> str:
    (text,) = [block.text for block in blocks(PAGE) if block.language == language]
    return text


def test_install_page_quotes_the_unit_file() -> None:
    assert quoted("ini") == UNIT.read_text("utf-8")


def test_unit_options_and_config_file_of_the_page_are_known_settings() -> None:
    ((command, subcommand, *options),) = [line.split() for line in service()["ExecStart"]]
    assert (Path(command).name, subcommand) == ("embedserve", "serve")
    flags = {one[2:].replace("-", "_") for one in options if one.startswith("--")}
    assert flags - SETTINGS == {"config"}
    file = tomllib.loads(quoted("toml"))
    assert set(file) - SETTINGS == set()
    (folder,) = service()["RuntimeDirectory"]
    assert Path(file["http_uds"]).parent == Path("/run", folder)


def test_stop_timeout_exceeds_the_drain() -> None:
    (stop_s,) = map(float, service()["TimeoutStopSec"])
    assert stop_s > DEFAULTS.drain_s + KILL_AFTER_S


def test_file_limit_allows_the_maximum_number_of_connections() -> None:
    (files,) = map(int, service()["LimitNOFILE"])
    assert files >= DEFAULTS.limits.connections_max + RESERVED


def test_unit_uses_notify_and_reload_signals() -> None:
    assert service()["Type"] == ["notify"]
    assert service()["KillMode"] == ["mixed"]
    assert service()["TimeoutStartSec"] == ["infinity"]
    assert service()["ExecReload"] == ["/bin/kill -HUP $MAINPID"]


def test_unit_enables_no_option_that_breaks_the_server() -> None:
    assert set(service()) & BREAKS_THE_SERVER == set()


def test_cache_directory_is_the_cache_of_the_server() -> None:
    assert service()["Environment"] == ["XDG_CACHE_HOME=%C"]
    assert service()["CacheDirectory"] == ["embedserve"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """Checks the unit statically; the command need not be installed."""
    unit = tmp_path / UNIT.name
    (command,) = service()["ExecStart"]
    unit.write_text(UNIT.read_text().replace(command.split()[0], "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

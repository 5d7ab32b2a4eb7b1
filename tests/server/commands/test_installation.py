"""Tests of incomplete installations: one line says what to install."""

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typer
from code_forker import start_code_forker
from documents import ROOT
from server.python import run_python

from embedserve import __main__, __version__
from embedserve.commands.cli_errors import cli_errors
from embedserve.commands.installation import INSTALL, check_releases, installed_versions

MAIN = "from embedserve.__main__ import main\nmain()"
IMPORT_COMMANDS = """
import embedserve.commands.cli, embedserve.commands.planning.plan
from typer import _adapters  # imported when arguments are parsed
"""
SERVE, DEMO = ["serve", "STORE"], ["demo", "STORE"]
PUBLISH = ["publish", "model.pt", "tables.yaml", "STORE", "--model", "m"]
PLAN = ["plan", "tables.yaml", "--world-size", "2", "--sharding", "auto"]
commands = pytest.mark.parametrize("command", [SERVE, DEMO, PUBLISH, PLAN], ids=lambda c: c[0])
TABLES = (
    "tables: [{name: t, num_embeddings: 10, embedding_dim: 4, feature_names: [t], pooling: sum}]"
)


@pytest.fixture(autouse=True)
def _tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tables.yaml").write_text(TABLES)
    (tmp_path / "model.pt").touch()
    monkeypatch.chdir(tmp_path)


Run = Callable[..., subprocess.CompletedProcess[str]]


def code_of(before: str, *command: str) -> str:
    return f"import sys\nsys.argv = {['embedserve', *command]}\n{before}\n{MAIN}"


def run_cold(before: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process that first executes ``before``."""
    return run_python("-c", code_of(before, *command))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Yields a function like run_cold, with the command line already imported."""
    folder = tmp_path_factory.mktemp("output")
    output = [folder / "stdout", folder / "stderr"]

    def run(before: str, *command: str) -> subprocess.CompletedProcess[str]:
        for file in output:
            file.write_text("")
        status = forker.run(code_of(before, *command), files=[*map(str, output)])
        return subprocess.CompletedProcess([], status, *[one.read_text() for one in output])

    with start_code_forker(IMPORT_COMMANDS) as forker:
        yield run


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    return line


@commands
@pytest.mark.parametrize("package", ["torch", "fbgemm_gpu", "torchrec"])
def test_missing_engine_package_is_named(run: Run, package: str, command: list[str]) -> None:
    """Covers `pip install 'embedserve[cpu]'`, which leaves out torchrec, as its wheel requires
    CUDA's FBGEMM."""
    line = only_line(run(f"sys.modules[{package!r}] = None", *command))
    assert line == f"embedserve: {package} is not installed: {INSTALL}"


@commands
def test_incompatible_fbgemm_and_torch_releases_are_reported(
    run: Run, command: list[str], tmp_path: Path
) -> None:
    _add_distribution(tmp_path, "fbgemm_gpu_cpu", "1.7.0")
    line = only_line(run(f"sys.path.insert(0, {str(tmp_path)!r})", *command))
    assert line.startswith(
        "embedserve: fbgemm-gpu-cpu 1.7.0 is built for torch 2.12, but torch 2.13"
    )
    assert line.endswith(INSTALL)


def test_two_installed_builds_of_fbgemm_are_reported(run: Run, tmp_path: Path) -> None:
    _add_distribution(tmp_path, "fbgemm_gpu_cpu", "1.8.0")
    _add_distribution(tmp_path, "fbgemm_gpu", "1.8.0")
    line = only_line(run(f"sys.path.insert(0, {str(tmp_path)!r})", *SERVE))
    assert line.startswith("embedserve: fbgemm-gpu-cpu and fbgemm-gpu are both installed")


def _add_distribution(folder: Path, name: str, version: str) -> None:
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (
            ImportError("libtorch.so: wrong ELF class\nmore", name="torch._C"),
            "torch does not fit this host or this Python (libtorch.so: wrong ELF class)",
        ),
        (OSError("libcudart.so.13: cannot open shared object file"), "libcudart.so.13"),
        (OSError("Could not load this library: fbgemm_gpu.so"), "fbgemm_gpu.so"),
        (ModuleNotFoundError(name="torchmetrics"), "torchmetrics is not installed"),
    ],
    ids=["another platform", "a missing library", "FBGEMM of no release", "a need of torchrec"],
)
def test_import_failures_of_packages_are_reported_in_one_line(
    fault: Exception, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit), cli_errors():
        raise fault
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("embedserve: ")
    assert expected in line
    assert line.endswith(INSTALL)


def test_reason_of_a_library_that_torch_cannot_load_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = tmp_path / "fbgemm.so"
    library.write_bytes(b"\x7fELF" + bytes(60))
    with pytest.raises(typer.Exit), cli_errors():
        torch.ops.load_library(library)
    assert f"embedserve: {library}: wrong ELF class" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("ImportError('libtorch.so: wrong ELF class', name='torch')", "libtorch.so: wrong ELF"),
        ("ModuleNotFoundError(\"No module named 'tensordict'\")", "No module named 'tensordict'"),
    ],
)
def test_import_failure_in_a_worker_is_reported_in_one_line(
    run: Run, fault: str, message: str, store: Path, tmp_path: Path
) -> None:
    """Covers workers, which import torch, while their supervisor does not."""
    (tmp_path / "torch.py").write_text(f"raise {fault}")
    ports = ["--http-port", "0", "--grpc-port", "0"]
    command = ["serve", str(store), "--workers", "2", *ports]
    line = only_line(run(f"sys.path.insert(0, {str(tmp_path)!r})", *command))
    assert line.startswith(f"embedserve: {message}")
    assert line.endswith(INSTALL)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_import_without_memory_is_reported_in_one_line(
    run: Run, workers: str, store: Path, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise MemoryError")
    ports = ["--http-port", "0", "--grpc-port", "0"]
    command = ["serve", str(store), "--workers", workers, *ports]
    line = only_line(run(f"sys.path.insert(0, {str(tmp_path)!r})", *command))
    assert line == "embedserve: importing PyTorch and TorchRec: no memory is left"


def test_import_error_of_embedserve_keeps_its_traceback() -> None:
    with pytest.raises(ImportError), cli_errors():
        raise ImportError("cannot import name", name="embedserve.engine")


@pytest.mark.parametrize("version", [(3, 10, 14), (3, 15, 0)])
def test_unsupported_python_is_reported(version: tuple[int, ...]) -> None:
    line = only_line(run_cold(f"sys.version_info = {version}", *SERVE))
    assert line.startswith(
        f"embedserve: this is Python 3.{version[1]}, and embedserve runs on 3.11"
    )


def test_version_check_is_valid_syntax_for_old_pythons() -> None:
    for path in (Path(__main__.__file__), ROOT / "server/embedserve/__init__.py"):
        ast.parse(path.read_text(), feature_version=(3, 7))


def test_missing_core_dependency_is_reported() -> None:
    line = only_line(run_cold("sys.modules['typer'] = None", *SERVE))
    assert line == "embedserve: typer is not installed: pip install embedserve"


@pytest.mark.parametrize(
    ("fbgemm", "torch", "is_right"),
    [
        ("1.8.0", "2.13.0+cpu", True),
        ("1.6.0+cu126", "2.11.1", True),
        ("1.8.0", "2.14.0", False),
        ("1.9.0", "2.13.0", False),
        ("2026.3.1", "2.13.0", True),
        ("1.8.0", "2.14.0.dev20260301", True),
    ],
)
def test_check_releases_accepts_only_compatible_releases(
    fbgemm: str, torch: str, is_right: bool
) -> None:
    versions = {"torch": torch, "fbgemm-gpu": fbgemm}
    if is_right:
        check_releases(versions)
    else:
        with pytest.raises(ValueError, match=re.escape(f"but torch {torch} is installed")):
            check_releases(versions)


def test_version_shows_versions_of_the_engine(run: Run) -> None:
    lines = run("", "--version").stdout.splitlines()
    assert lines[0] == f"embedserve {__version__}"
    shown = dict(line.split() for line in lines[1:])
    assert shown == installed_versions()
    assert {"Python", "torch", "torchrec"} <= shown.keys()


def test_version_does_not_import_torch(run: Run) -> None:
    code = "import atexit\natexit.register(lambda: print('torch' in sys.modules))"
    assert run(code, "--version").stdout.splitlines()[-1] == "False"


def test_install_hint_names_the_torchrec_version_of_the_makefile() -> None:
    (version,) = re.findall(r"^TORCHREC := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"pip install --no-deps torchrec=={version}" in INSTALL

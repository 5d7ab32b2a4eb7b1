"""Tests of the fork server: a forked process behaves like one that starts normally."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from forkserver import PYTHON, WarmPopen, run_warm

TIMEOUT_S = 120


def test_forked_child_has_its_own_arguments_folder_and_environment(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getppid(), os.getcwd(), sys.argv, os.environ, input())"
    pipe = subprocess.PIPE
    environment = {"ONLY": "this"}
    with WarmPopen(
        [*PYTHON, "-c", code, "a", tmp_path],
        cwd=tmp_path,
        env=environment,
        stdin=pipe,
        stdout=pipe,
        text=True,
    ) as process:
        printed, _ = process.communicate("asked\n", timeout=TIMEOUT_S)
    arguments = ["-c", "a", str(tmp_path)]
    assert printed == f"{os.getpid()} {tmp_path} {arguments} environ({environment}) asked\n"
    assert process.returncode == 0


def test_torch_is_imported_in_a_single_thread() -> None:
    code = (
        "import os, sys; print('torch' in sys.modules, "
        "os.listdir('/proc/self/task') == [str(os.getpid())], len(os.listdir('/proc/self/fd')))"
    )
    done = run_warm([*PYTHON, "-c", code], timeout=TIMEOUT_S)
    assert done.stdout == "True True 4\n"  # three standard files, and the listed folder


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('why')", 1, "why"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(print, 'end', file=sys.stderr)", 0, "end"),
    ],
)
def test_exit_status_of_the_child_is_returned(code: str, status: int, error: str) -> None:
    done = run_warm([*PYTHON, "-c", code], timeout=TIMEOUT_S)
    assert done.returncode == status
    assert done.stderr.splitlines()[-1:] == ([error] if error else [])


def test_child_receives_signals() -> None:
    code = "import time; print('started', flush=True); time.sleep(600)"
    with WarmPopen([*PYTHON, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        assert process.poll() is None
        process.terminate()
        assert process.wait(TIMEOUT_S) == -signal.SIGTERM


def test_modules_and_scripts_run_as_main(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, beside; print(__name__, sys.argv[1:])\n")
    (tmp_path / "beside.py").touch()
    for command in ([script], ["-m", "script"]):
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        done = run_warm([*PYTHON, *command, "x"], env=environment, timeout=TIMEOUT_S)
        assert done.stdout == "__main__ ['x']\n", done.stderr


def test_other_python_interpreter_is_rejected() -> None:
    with pytest.raises(ValueError, match="is not run by"):
        run_warm(["python", "-c", "pass"], timeout=TIMEOUT_S)


def test_processes_started_by_the_child_are_forked_on_request() -> None:
    of_child = "import os, sys; print('torch' in sys.modules, os.getppid(), flush=True)"
    code = (
        "import os, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-W', 'ignore', '-c', {of_child!r}], check=True)\n"
        "subprocess.run(['echo', 'another'], check=True)\n"
        "print(os.getpid())"
    )
    for is_warm in (True, False):
        done = run_warm([*PYTHON, "-c", code], timeout=TIMEOUT_S, has_warm_children=is_warm)
        *printed, pid = done.stdout.splitlines()
        assert printed == [f"{is_warm} {pid}", "another"], done.stderr


def test_child_may_have_a_fork_server_of_its_own() -> None:
    of_child = "import os, sys; print('torch' in sys.modules, os.getppid())"
    code = (
        "from forkserver import PYTHON, run_warm\n"
        f"print(run_warm([*PYTHON, '-c', {of_child!r}], timeout={TIMEOUT_S}).stdout, end='')"
    )
    command = [*PYTHON, "-c", code]
    with WarmPopen(command, has_forker=True, stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate(timeout=TIMEOUT_S)[0] == f"True {process.pid}\n"
    assert process.returncode == 0


def test_child_may_lead_a_session() -> None:
    code = "import os; print(os.getsid(0) == os.getpid())"
    for is_session in (True, False):
        command = [*PYTHON, "-c", code]
        with WarmPopen(
            command, start_new_session=is_session, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.communicate(timeout=TIMEOUT_S)[0] == f"{is_session}\n"

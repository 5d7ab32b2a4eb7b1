"""Tests of the command line: quick help, the precedence of settings, and one line for each error
that a user can fix."""

import errno
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer
from server.python import environment, run_python, run_warm_python
from typer.main import get_group
from typer.testing import CliRunner, Result

from embedserve.commands.cli import app
from embedserve.commands.cli_errors import cli_errors
from embedserve.config import Limits, ServeSettings

HEAVY = ("torch", "torchrec", "fbgemm_gpu", "fastapi", "grpc", "numpy", "uvicorn")
NO_PROCESS = "no process or thread can be started: a limit of the user or container is reached"


@pytest.fixture(autouse=True)
def no_settings_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EMBEDSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "300")  # help is wrapped at the terminal's width


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeSettings]:
    """Replaces `serve`; returns the list of settings that it would have run with."""
    settings: list[ServeSettings] = []
    command = types.ModuleType("embedserve.processes.serve")
    command.serve = settings.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "embedserve.processes.serve", command)
    return settings


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def embedserve(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_warm_python("-m", "embedserve", *arguments)


def run_with_closed(streams: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with ``streams`` closed, in the shell's notation."""
    command = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)


def test_closed_streams_are_those_of_dev_null() -> None:
    """Checks that no socket has the descriptor of stderr, to which libraries write."""
    code = """
import os, sys
from embedserve.__main__ import main
sys.argv = ["embedserve", "--version"]
try:
    main()
finally:
    print(*[os.readlink(f"/proc/self/fd/{one}") for one in (0, 2)], sys.stderr.fileno())
"""
    done = run_with_closed("<&- 2>&-", "-c", code)
    assert done.stdout.endswith("/dev/null /dev/null 2\n")


def test_server_starts_without_stdout(tmp_path: Path) -> None:
    """Checks that a start which forks gets as far as the store."""
    arguments = ("serve", str(tmp_path), "--http-port", "0", "--grpc-port", "0")
    done = run_with_closed(">&-", "-m", "embedserve", *arguments)
    assert done.stderr == f"embedserve: {tmp_path}: no model in this store; publish one first\n"


@pytest.mark.parametrize("command", ["", *(one.name for one in get_group(app).commands.values())])
def test_help_shows_no_bool_type_for_switches(command: str) -> None:
    output = run(*command.split(), "--help").output
    assert "--help" in output
    assert "<bool>" not in output


def test_help_imports_no_heavy_packages() -> None:
    commands = [(), ("serve",), ("publish",), ("inspect",), ("demo",)]
    code = (
        "import sys\n"
        "from embedserve.commands.cli import app\n"
        f"for command in {commands}:\n"
        "    app([*command, '--help'], standalone_mode=False)\n"
        f"    print('heavy:', *[m for m in {HEAVY} if m in sys.modules])"
    )
    done = run_python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    *helps, rest = done.stdout.split("heavy:\n")
    assert rest == ""
    assert len(helps) == len(commands)
    assert all("--help" in one for one in helps)


def test_help_of_serve_shows_every_setting_with_its_variable() -> None:
    text = run("serve", "--help").stdout
    names = {*ServeSettings.__dataclass_fields__, *Limits.__dataclass_fields__} - {"limits"}
    for name in names:
        assert f"EMBEDSERVE_{name.upper()}]" in text


def test_defaults_apply_without_any_setting(served: list[ServeSettings]) -> None:
    assert run("serve", "store").exit_code == 0
    assert served == [ServeSettings(store="store")]


def test_flags_override_variables_and_variables_override_the_file(
    served: list[ServeSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "serve.toml"
    config.write_text("host = 'file'\nhttp_port = 1\ngrpc_port = 1\nbatch_ids_max = 1\n")
    monkeypatch.setenv("EMBEDSERVE_HTTP_PORT", "2")
    monkeypatch.setenv("EMBEDSERVE_GRPC_PORT", "2")
    result = run("serve", "store", "--config", config, "--grpc-port", "3")
    assert result.exit_code == 0
    (settings,) = served
    assert settings.host == "file"
    assert (settings.http_port, settings.grpc_port) == (2, 3)
    assert settings.limits.batch_ids_max == 1
    assert settings.limits.queue_ids_max == Limits().queue_ids_max


def test_settings_are_read_from_the_config_file(
    served: list[ServeSettings], tmp_path: Path
) -> None:
    config = tmp_path / "serve.toml"
    config.write_text(
        "store = 'elsewhere'\nmodel = ['a', 'b']\ndefault_model = 'b'\ndevices = 'cpu:2'\n"
        "strict_plan = true\nverify = true\ndrain_s = 2.5\nlog_level = 'debug'\n"
        "delay_ms_max = 0.5\ninline_bytes_max = 0\n"
    )
    assert run("serve", "--config", config).exit_code == 0
    assert served == [
        ServeSettings(
            store="elsewhere",
            model=("a", "b"),
            default_model="b",
            devices="cpu:2",
            strict_plan=True,
            verify=True,
            drain_s=2.5,
            log_level="debug",
            limits=Limits(delay_ms_max=0.5, inline_bytes_max=0),
        )
    ]


def test_serve_runs_with_environment_variables_only(
    served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "serve.toml"
    config.write_text("drain_s = 3\n")
    monkeypatch.setenv("EMBEDSERVE_CONFIG", str(config))
    monkeypatch.setenv("EMBEDSERVE_STORE", "there")
    monkeypatch.setenv("EMBEDSERVE_MODEL", "a b")
    monkeypatch.setenv("EMBEDSERVE_VERIFY", "true")
    assert run("serve").exit_code == 0
    (settings,) = served
    assert settings == ServeSettings(store="there", model=("a", "b"), verify=True, drain_s=3)


@pytest.mark.parametrize(
    ("content", "expected_name"),
    [
        (b"http_prot = 1\n", "unknown key 'http_prot', did you mean http_port? (embed"),
        (b"limits = 1\n", "unknown key 'limits' (embed"),
        (b"[server]\nhost = 'x'\n", "'server'"),
        (b"host = \n", "serve.toml"),
        (b"host = '\xff'\n", "serve.toml"),
        (b"http_port = 'many'\n", "serve.toml: http_port is 'many', expected a number"),
        (b"queue_ids_max = -1\n", "--queue-ids-max"),
        (b"grpc_port = 65536\n", "--grpc-port"),
    ],
)
def test_invalid_config_file_stops_the_start_and_names_the_error(
    served: list[ServeSettings], tmp_path: Path, content: bytes, expected_name: str
) -> None:
    config = tmp_path / "serve.toml"
    config.write_bytes(content)
    result = run("serve", "store", "--config", config)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("embedserve: ")
    assert expected_name in line
    assert served == []


def test_missing_config_file_stops_the_start(served: list[ServeSettings]) -> None:
    result = run("serve", "store", "--config", "nowhere.toml")
    assert result.exit_code == 2
    assert "nowhere.toml: No such file" in result.stderr
    assert served == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('model = "shop"', "model is 'shop', expected a list of strings"),
        ("model = [1]", "model is [1], expected a list of strings"),
        ("host = {a = 1}", "host is {'a': 1}, expected a string"),
        ("tls_cert = false", "tls_cert is False, expected a string"),
        ("workers = true", "workers is True, expected a number"),
        ("queue_ids_max = [1]", "queue_ids_max is [1], expected a number"),
        ("wait = 2", "wait is 2, expected true or false"),
    ],
)
def test_config_value_of_the_wrong_kind_is_named_with_its_file(
    tmp_path: Path, served: list[ServeSettings], text: str, words: str
) -> None:
    config = tmp_path / "c.toml"
    config.write_text(text)
    result = run("serve", "store", "--config", config)
    assert result.exit_code == 2
    assert f"c.toml: {words}" in result.stderr
    assert served == []


def test_router_config_of_a_cluster_is_checked_before_it_starts(tmp_path: Path) -> None:
    config = tmp_path / "router.toml"
    for text, words in (
        ("workers: 2", "router.toml: Expected '=' after a key"),
        ("worker = 2", "unknown key 'worker'"),
    ):
        config.write_text(text)
        result = run("cluster", "store", "--router-config", config)
        assert result.exit_code == 2
        assert words in result.stderr


def check_one_line(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Checks for exit status 1, one line on stderr that contains ``parts``, and no stdout."""
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("embedserve: ")
    for part in parts:
        assert part in line


ANY_PORTS = ("--http-port", "0", "--grpc-port", "0")
"""Free ports, because the ports are claimed before the store is read."""


def test_serving_a_missing_store_prints_one_error_line(tmp_path: Path) -> None:
    done = embedserve("serve", tmp_path / "nowhere", *ANY_PORTS)
    check_one_line(done, str(tmp_path / "nowhere"))


def test_shared_memory_on_public_ports_prints_one_error_line(tmp_path: Path) -> None:
    done = embedserve("serve", tmp_path, "--host", "0.0.0.0", "--shared-memory", "/ranker-")
    check_one_line(done, "shared_memory is '/ranker-', but host is '0.0.0.0'", "use 127.0.0.1")


def test_serving_an_empty_store_prints_one_error_line(tmp_path: Path) -> None:
    check_one_line(embedserve("serve", tmp_path, *ANY_PORTS), str(tmp_path), "no model")


def test_inspecting_a_missing_store_prints_one_error_line(tmp_path: Path) -> None:
    check_one_line(embedserve("inspect", tmp_path / "nowhere"), str(tmp_path / "nowhere"))


def test_unknown_log_level_prints_one_error_line(tmp_path: Path) -> None:
    check_one_line(embedserve("serve", tmp_path, "--log-level", "loud"), "log_level is 'loud'")


def test_missing_or_invalid_labels_are_named_with_their_setting(tmp_path: Path) -> None:
    """Covers the file that is no secret; test_secrets.py has the others."""
    done = embedserve("serve", tmp_path, "--labels", "nowhere")
    check_one_line(done, "labels: [Errno 2] No such file or directory: 'nowhere'")
    invalid = tmp_path / "invalid"
    invalid.write_text("tables:\n")
    check_one_line(embedserve("serve", tmp_path, "--labels", invalid), f"labels: {invalid}")


def test_error_of_a_file_names_it_and_the_reason_alone(tmp_path: Path) -> None:
    missing = tmp_path / "a\nb"
    done = embedserve("admin", "http://127.0.0.1:1", "reload", "--token-file", missing)
    path = str(missing).replace("\n", "\\x0a")
    assert (done.returncode, done.stderr) == (1, f"embedserve: {path}: No such file or directory\n")


def test_output_to_a_terminal_of_unknown_width_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    done = run_python("-m", "embedserve", "inspect", tmp_path)
    assert (done.returncode, done.stdout) == (0, f"store {tmp_path}: no models\n")


def test_output_is_escaped_for_encodings_other_than_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    (tmp_path / "ü").mkdir()
    done = run_python("-m", "embedserve", "inspect", tmp_path / "ü")
    assert (done.returncode, done.stdout) == (0, f"store {tmp_path}/\\xfc: no models\n")


def test_full_disk_of_the_output_prints_one_error_line() -> None:
    assert token_into(os.open("/dev/full", os.O_WRONLY)) == (
        1,
        "embedserve: [Errno 28] No space left on device\n",
    )


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_full_disk_of_help_and_version_prints_one_error_line(option: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "embedserve", option],
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    line = "embedserve: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == (1, line)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "no memory is left"),
        (MemoryError("Unable to allocate"), "Unable to allocate"),
        (RuntimeError("can't start new thread"), NO_PROCESS),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), NO_PROCESS),
        (BlockingIOError(errno.EAGAIN, "would block", 0), f"[Errno {errno.EAGAIN}] would block"),
    ],
)
def test_lack_of_memory_threads_or_processes_prints_one_error_line(
    error: Exception, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit), cli_errors():
        raise error
    assert capsys.readouterr().err == f"embedserve: {message}\n"


def test_other_runtime_errors_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="a fault"), cli_errors():
        raise RuntimeError("a fault")


def test_numpy_starts_no_threads_for_the_cores_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    code = (
        "import os, sys\n"
        "from embedserve.__main__ import main\n"
        "try: main()\n"
        "finally: print('numpy' in sys.modules, len(os.listdir('/proc/self/task')))"
    )
    assert run_python("-c", code, "inspect", tmp_path).stdout.endswith("True 1\n")


def test_closed_pipe_of_the_output_is_no_error_to_report() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert token_into(writer) == (1, "")


def token_into(stdout: int) -> tuple[int, str]:
    """Creates a token; returns the exit status and what stderr has after the token."""
    done = subprocess.run(
        [sys.executable, "-m", "embedserve", "token", "x"],
        env={name: one for name, one in environment().items() if name != "PYTHONUNBUFFERED"},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(stdout)
    return done.returncode, done.stderr.partition("\n")[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("health --http-port tcp://1.2.3.4", "'--http-port' (env var: 'EMBEDSERVE_HTTP_PORT')"),
        ("health --http-port tcp://1.2.3.4", "'tcp://1.2.3.4'"),
        ("health --http-port", "'--http-port'"),
        ("health --http-port 65536", "'--http-port'"),
        ("health --http-prt 1", "--http-prt"),
        ("health --ready=yes", "--ready"),
        ("healht", "No such command 'healht'"),
        ("deltas undo store movies --to 1.5 --why it", "'1.5'"),
        ("cluster", "Missing argument 'store'"),
    ],
)
def test_error_in_arguments_is_one_line(
    arguments: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    result = run(*arguments.split())
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("embedserve: ")
    assert words in line


@pytest.mark.parametrize(
    ("flag", "value"), [("--drain-s", "inf"), ("--drain-s", "nan"), ("--body-bytes-max", "4e9")]
)
def test_invalid_numbers_are_rejected(flag: str, value: str) -> None:
    result = run("serve", "store", flag, value)
    assert result.exit_code == 2
    assert flag in result.output


def test_demo_rejects_a_url_before_it_trains() -> None:
    result = CliRunner().invoke(app, ["demo", "s3://bucket/store"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("embedserve: store is 's3://bucket/store', expected a folder")

"""Fixtures of the interoperability tests: one small store, and one server of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from interop.lookups import DIMS, MODEL, ROWS, SHARED_MEMORY, TABLES
from running_servers import Running, run_warm_command, running
from safetensors.numpy import save_file

TABLE = (
    "- {{name: {name}, num_embeddings: {rows}, embedding_dim: {dim}, "
    "feature_names: [{name}], pooling: sum}}\n"
)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interop")
    weights = {f"embedding_bags.{name}.weight": table for name, table in TABLES.items()}
    save_file(weights, folder / "model.safetensors")
    tables = [TABLE.format(name=name, rows=rows, dim=DIMS[name]) for name, rows in ROWS.items()]
    (folder / "tables.yaml").write_text("tables:\n" + "".join(tables))
    names = (folder / "model.safetensors", folder / "tables.yaml", folder / "store")
    done = run_warm_command("publish", *names, "--model", MODEL)
    assert done.returncode == 0, done.stderr
    return folder / "store"


@pytest.fixture(scope="session")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Runs a server until the last of these tests has ended."""
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--request-values-max", 1_000_000)  # for JSON of megabytes
    here = ("--http-uds", uds_of(log), "--shared-memory", SHARED_MEMORY)
    with running(store, log, *options, *here) as server:
        yield server


def uds_of(log: Path) -> Path:
    return log.with_name("http.sock")


@pytest.fixture(scope="session")
def uds(server: Running) -> Path:
    """Returns the server's Unix socket."""
    return uds_of(server.log)


@pytest.fixture(scope="session")
def target(server: Running) -> str:
    """Returns HOST:PORT of gRPC."""
    return server.grpc


@pytest.fixture(params=["http", "grpc"])
def each_port(server: Running, request: pytest.FixtureRequest) -> str:
    """Returns HOST:PORT of the HTTP port, then of the gRPC port: both accept every protocol."""
    return server.http.removeprefix("http://") if request.param == "http" else server.grpc

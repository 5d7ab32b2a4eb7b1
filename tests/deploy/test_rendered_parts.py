"""Tests of real shards and a router that run as rendered: responses equal the version's goldens.

The command of docs/parts.md prints the shards. The router reads a file instead of DNS. There each
part has the addresses of the pods that its rendered Service selects.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from documents import ROOT
from forkserver import PYTHON, run_warm
from running_servers import COMMAND_S_MAX
from server.python import run_warm_python

from embedserve.shard_client.discovery import PART, DnsShards, parse_shards
from embedserve_client import GrpcEmbedClient
from embedserve_store.model_store import ModelStore

from .conftest import Rendered
from .parts_overlay import Shard, render_with, shards_of
from .rendered_server import Served, running_as, write_secrets

PARTS, ROWS = 2, 100
PUBLISH = """
import sys, torch
from embedserve.commands.cli import app
checkpoint, tables, store, parts = sys.argv[1:]
torch.save({"embedding_bags.t_user.weight": torch.arange(400.0).reshape(-1, 4)}, checkpoint)
app(["publish", checkpoint, tables, store, "--model", "shop", "--hosts", parts])
"""
TABLE = {
    "name": "t_user",
    "num_embeddings": ROWS,
    "embedding_dim": 4,
    "feature_names": ["user"],
    "pooling": "mean",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    write_secrets(folder, [f"embedserve-part-{part}" for part in range(PARTS)])
    (folder / "tables.yaml").write_text(yaml.safe_dump({"tables": [TABLE]}))
    paths = folder / "model.pt", folder / "tables.yaml", folder / "store"
    done = run_warm_python("-c", PUBLISH, *paths, str(PARTS))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """Returns the page's command's output for the published version."""
    page = (ROOT / "docs" / "parts.md").read_text()
    (arguments,) = re.findall(r"^ +embedserve (plan .*) > shop/parts\.yaml$", page, re.MULTILINE)
    command = [*PYTHON, "-m", "embedserve", *arguments.split()]
    done = run_warm(command, cwd=folder, timeout=COMMAND_S_MAX)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def write_addresses(path: Path, rendered: Rendered, shards: Sequence[tuple[Shard, Served]]) -> None:
    """Writes the addresses that DNS would return for the names that the router looks up."""
    source = parse_shards(rendered.variables["EMBEDSERVE_SHARDS"])
    assert isinstance(source, DnsShards)
    found: dict[str, list[str]] = {}
    for part in range(PARTS):
        service = rendered.one("Service", source.name.replace(PART, str(part)))
        (port,) = service["spec"]["ports"]
        assert port["port"] == source.port
        selector = service["spec"]["selector"].items()
        found[str(part)] = [
            f"127.0.0.1:{served.ports[port['targetPort']]}"
            for shard, served in shards
            if selector <= shard.stateful_set["spec"]["template"]["metadata"]["labels"].items()
        ]
    path.write_text(json.dumps(found))


@pytest.fixture(
    scope="module",
    params=[(), ("mtls", "management-port", "monitoring")],
    ids=lambda names: "+".join(names) or "plain",
)
def router(request: pytest.FixtureRequest, folder: Path, printed: str) -> Iterator[Served]:
    rendered = render_with(printed, *request.param)
    own = folder / (rendered.name.partition("+")[0])
    own.mkdir()
    with ExitStack() as stack:
        shards = [
            (shard, stack.enter_context(running_as(shard, folder, f"{own.name}/{shard.part}")))
            for shard in shards_of(rendered)
        ]
        addresses = own / "shards.json"
        write_addresses(addresses, rendered, shards)
        changed = {"EMBEDSERVE_SHARDS": f"file:{addresses}"}
        yield stack.enter_context(running_as(rendered, folder, f"{own.name}/router", changed))


def credentials(router: Served) -> dict[str, Any]:
    """Returns the credentials of a caller of the router."""
    if "mtls" not in router.rendered.components:
        return {}
    pair = router.secrets / "embedserve-prometheus-tls"
    return {
        "ca": pair / "ca.crt",
        "certificate": (pair / "tls.crt", pair / "tls.key"),
        "token": (router.secrets / "embedserve-shard-token" / "token").read_text(),
    }


def test_router_returns_the_goldens_of_the_version(router: Served, folder: Path) -> None:
    goldens = ModelStore(folder / "store").load("shop").goldens()
    (lengths,) = goldens.bags.lengths
    bags = np.split(goldens.bags.ids, np.cumsum(lengths)[:-1])
    assert goldens.bags.ids.min() < ROWS // PARTS <= goldens.bags.ids.max()
    address = f"localhost:{router.ports['grpc']}"
    with GrpcEmbedClient(address, **credentials(router)) as client:
        result = client.embed({"user": [bag.tolist() for bag in bags]}, timeout_s=60)
    np.testing.assert_allclose(np.asarray(result["user"]), goldens.source_answers, rtol=1e-6)


def test_probes_of_the_router_pass(router: Served) -> None:
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert router.passes(router.rendered.container[probe]), probe

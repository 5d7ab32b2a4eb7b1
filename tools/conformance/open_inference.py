"""Checks whether a server follows the Open Inference Protocol, version 2. It sends a request for
each clause over REST and gRPC, and prints a line for each.

    python tools/conformance/open_inference.py --model movies

The model's own metadata define the requests. Every input is sent empty, for two examples, which any
model of embedserve answers. Other servers need a model with such tensors (of_triton.py).
--shared-memory PREFIX also checks shared memory, with regions whose keys begin so. Exits with 1 if
a clause is violated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc
import httpx
from conformance import grpc_clauses as rpc
from conformance import rest_clauses as rest
from conformance.asked import ANSWER_S_MAX, ServerUnderTest

CLAUSES: tuple[Callable[[ServerUnderTest], None], ...] = (
    rest.server_metadata,
    rest.health,
    rest.model_ready,
    rest.model_metadata,
    rest.versions,
    rest.infer_json,
    rest.infer_selection,
    rest.infer_binary,
    rest.infer_binary_per_output,
    rest.infer_errors,
    rpc.health,
    rpc.metadata,
    rpc.infer,
    rpc.errors,
    rpc.stream,
    rpc.statistics,
    rpc.configuration,
    rpc.repository,
    rest.shared_memory,
)


def said(asked: ServerUnderTest, clause: Callable[[ServerUnderTest], None]) -> str:
    """Returns the reason why a clause is violated; "" if it is kept."""
    try:
        clause(asked)
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"
    except Exception as error:
        return str(error).splitlines()[0] if str(error) else repr(error)
    return ""


def name_of(clause: Callable[[ServerUnderTest], None]) -> str:
    return clause.__name__ if clause.__module__ == rest.__name__ else f"rpc_{clause.__name__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--http", default="localhost:8000", help="HOST:PORT of REST")
    parser.add_argument("--grpc", default="localhost:8001", help="HOST:PORT of gRPC")
    parser.add_argument("--model", required=True)
    parser.add_argument("--shared-memory", default="", help="what keys of its regions begin with")
    given = parser.parse_args()
    wrong = 0
    with (
        httpx.Client(base_url=f"http://{given.http}", timeout=ANSWER_S_MAX) as http,
        grpc.insecure_channel(given.grpc) as channel,
    ):
        asked = ServerUnderTest(http, channel, given.model, given.shared_memory)
        clauses = [one for one in CLAUSES if given.shared_memory or one is not rest.shared_memory]
        for clause in clauses:
            problem = said(asked, clause)
            wrong += bool(problem)
            result = f"FAILED: {problem}" if problem else "ok"
            print(f"{name_of(clause):24} {clause.__doc__}: {result}")
    print(f"{len(clauses) - wrong} of {len(clauses)} clauses are kept")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Tests of TorchRec's own client of its predictor: responses equal /embed's."""

import argparse
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine
from server.fake_models import model_info
from server.live import live_server
from server.predictions import predicted

from embedserve_proto import predictor_pb2, predictor_pb2_grpc

BATCH = 100
ROWS = 1000


@pytest.fixture
def client() -> Iterator[ModuleType]:
    """Yields torchrec.inference.client, which imports its generated code by these names."""
    pytest.importorskip("torchrec")
    names = {"predictor_pb2": predictor_pb2, "predictor_pb2_grpc": predictor_pb2_grpc}
    sys.modules.update(names)
    yield importlib.import_module("torchrec.inference.client")
    for name in (*names, "torchrec.inference.client"):
        del sys.modules[name]


async def test_torchrec_client_gets_the_result_of_embed(client: ModuleType) -> None:
    from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES

    keys = tuple(DEFAULT_CAT_NAMES)
    options = argparse.Namespace(
        batch_size=BATCH,
        num_embedding_features=ROWS,
        num_float_features=len(DEFAULT_INT_NAMES),
        num_id_list_features=len(keys),
    )
    batch = client.create_training_batch(options)
    request = client.create_request(batch, options)
    assert request.float_features.values
    jagged = batch.sparse_features.to_dict()
    bags: Bags = {key: [one.tolist() for one in jagged[key].to_dense()] for key in keys}
    engine = FakeEngine(model_info("criteo", dict.fromkeys(keys, (ROWS, 8))))
    async with live_server(engine) as live:
        response = await client.predictor_pb2_grpc.PredictorStub(live.channel).Predict(request)
        embedded = await live.http.post("/embed", json={"features": bags})
    expected = np.array(embedded.json()["values"], np.float32)
    assert np.array_equal(predicted(response, keys, BATCH), expected)
    assert np.array_equal(expected, engine.expected(bags))

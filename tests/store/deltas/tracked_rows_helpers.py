"""Helpers of the tests of tracked rows: copies of the tables, which taken rows bring up to date."""

from typing import Any

import pytest
import torch
from store.deltas.tracked_training import TABLES, dense_optimizer, gathered
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync

TRACKED = {name: table for name, table in TABLES.items() if name != "country"}

TRACKING_MARKS = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning"),
]


def ids_of(bags: dict[str, list[int]]) -> KeyedJaggedTensor:
    """Returns one example with a bag of each feature."""
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor([i for ids in bags.values() for i in ids], dtype=torch.int64),
        lengths=torch.tensor([len(ids) for ids in bags.values()]),
    )


def semi_sync_pipeline(
    dmp: DistributedModelParallel, monkeypatch: pytest.MonkeyPatch
) -> TrainPipelineSemiSync:
    """Returns TorchRec's pipeline that looks up the next batch before this batch's backward pass.

    The pipeline supports only CUDA streams; on the CPU there is one stream.
    """
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", torch.cpu.current_stream)
    cpu = torch.device("cpu")
    return TrainPipelineSemiSync(dmp, dense_optimizer(dmp), cpu, start_batch=0)


def lost_rows(served: dict[str, torch.Tensor], dmp: DistributedModelParallel) -> int:
    now = gathered(dmp)
    return sum(int((served[name] != now[name]).any(1).sum()) for name in now)


def apply_rows(served: dict[str, torch.Tensor], taken: dict[str, Any]) -> None:
    for name, (numbers, rows) in taken.items():
        served[name][torch.from_numpy(numbers)] = rows

"""Runs a function on several ranks, processes that meet over gloo."""

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(world_size: int, run: Callable[..., None], *arguments: Any) -> None:
    """Calls ``run(rank, *arguments)`` in a process of each rank. Forked ranks need not import torch
    again, which takes longer than everything they do."""
    with tempfile.TemporaryDirectory() as meeting:
        rendezvous = f"file://{meeting}/rendezvous"
        forked = (world_size, rendezvous, run, arguments)
        mp.start_processes(_run, forked, nprocs=world_size, start_method="fork")


def _run(
    rank: int,
    world_size: int,
    rendezvous: str,
    run: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    run(rank, *arguments)
    dist.destroy_process_group()
    # All files are written. On a busy machine torch's threads may outlive the objects that they use
    # in an orderly exit, which aborts the process.
    sys.stdout.flush()
    os._exit(0)

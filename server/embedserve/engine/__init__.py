"""The engine package: torch and torchrec live here and in the model store, nowhere else.

sharded.py (unpooled.py for an EmbeddingCollection) builds the DistributedModelParallel, bind.py
gives it its rows, script.py compiles it (trace.py down to tensor operations), engine.py answers,
restore.py puts them together. gpus.py tells whether tables can go to this host's GPUs, and
cuda_limits.py which ones; staging.py takes rows there, device_batches.py batches.
"""

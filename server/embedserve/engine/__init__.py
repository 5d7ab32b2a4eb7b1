"""The engine package. Only it, the router's engine (fanout) and the model store use torch.

sharded.py builds the DistributedModelParallel, or unpooled.py for an EmbeddingCollection.
attach_weights.py gives it its rows, and compile.py compiles it (trace.py down to tensor
operations). engine.py runs lookups, and restore.py assembles these. gpus.py checks whether tables
can go to this host's GPUs, and cuda_limits.py which tables can. device_upload.py copies rows to
GPUs, device_batches.py batches, gpu_spare_rows.py rows that change.
"""

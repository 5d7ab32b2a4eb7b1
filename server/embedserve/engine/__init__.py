"""The engine package: torch and torchrec live here and in the model store, nowhere else.

sharded.py builds the DistributedModelParallel, script.py compiles it, engine.py answers,
restore.py puts the three together.
"""

"""Shared-memory input and output: files of /dev/shm that callers on this host register.

The server reads ids from them and writes results to them. region.py is one range of a file,
region_registry.py has the regions of all callers and their limits, memory_slice.py locates a tensor
in a region. These modules handle bytes, not tensors.
"""

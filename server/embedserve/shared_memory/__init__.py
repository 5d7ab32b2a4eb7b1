"""Shared-memory input and output: files of /dev/shm that callers on this host register.

The server reads ids from them and writes results to them. region.py has a range of a file, and
slices of it; region_registry.py has the regions of all callers and their limits. These modules
handle bytes, not tensors.
"""

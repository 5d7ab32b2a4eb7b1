"""Servers of the benchmark: embedserve, its baselines and its peers."""

"""The servers of the benchmark: embedserve, what it is measured against, and its peers."""

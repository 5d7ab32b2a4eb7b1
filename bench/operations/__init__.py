"""Measurements for operators, which `make bench` runs after the workloads."""

"""Metrics: counters and histograms that the workers share, exported in Prometheus' text format.

log_stream.py and rate_limited_logger.py bound what the log costs, and count what it leaves out.
"""

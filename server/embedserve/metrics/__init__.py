"""Metrics: counters and histograms that the workers share, exported in Prometheus' text format."""

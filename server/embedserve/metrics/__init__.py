"""Metrics: counts and histograms that workers share, as Prometheus reads them."""

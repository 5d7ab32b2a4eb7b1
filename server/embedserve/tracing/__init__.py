"""Telemetry of a request: request id, latency breakdown, log line and trace."""

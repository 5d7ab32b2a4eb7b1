"""Clients over gRPC, sync and async, and their streams."""

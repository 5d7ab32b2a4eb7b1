"""How the tests' gRPC channels are opened."""

from __future__ import annotations

OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
"""Else channels of one process share connections by their address: where a port comes again, a new
channel fails with what an older one met while no server was there."""

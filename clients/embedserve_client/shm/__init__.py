"""Lookups through shared memory, for clients on the host of the server."""

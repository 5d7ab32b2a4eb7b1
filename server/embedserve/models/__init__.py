"""Served models: the registry of versions by name, and the traffic split between them."""

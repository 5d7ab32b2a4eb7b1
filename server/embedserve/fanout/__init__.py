"""Client side of a router: its connections to shards, the replicas of each part, and discovery.

Everything runs in callbacks of one event loop.
"""

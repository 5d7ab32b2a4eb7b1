"""Calls to the shards of a router: connections, the replicas of each part, and their discovery.

Everything runs in callbacks of one event loop, without a thread or a task for each call. Never
imports torch.
"""

"""Calls to the shards of a router: connections, the replicas of each part, and their discovery.

part_client.py has the replicas of a part, part_call.py one lookup, and replica.py one replica.
docs/architecture.md has the other files, and the rules of retries and hedges. Everything runs in
callbacks of one event loop, without a thread or a task for each call. Never imports torch.
"""

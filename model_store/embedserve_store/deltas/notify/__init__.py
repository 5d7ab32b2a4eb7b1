"""Notifications that a delta was published, over Redis Streams or NATS; optional. Imports no torch.

A notification ends a wait early and is believed in nothing else: the store alone says which deltas
there are.
"""

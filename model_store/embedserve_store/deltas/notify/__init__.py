"""Notifications that a delta was published, over Redis Streams or NATS; optional. Imports no torch.

The content of a notification is not trusted. It ends a wait early; the store alone says which
deltas there are.
"""

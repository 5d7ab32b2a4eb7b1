"""Notifications that a delta was published, over Redis Streams or NATS; optional. Imports no torch.

The content of a notification is not trusted. It ends a wait early; the store alone says which
deltas there are. broker_url.py reads the broker's URL, and broker.py defines a connection, which
redis_broker.py and nats_broker.py implement. notifier.py (made by make_notifier.py) sends
notifications for a writer; the server's deltas/delta_subscriber.py receives them.
"""

"""Clients over REST, sync and async.

client.py has the clients, requests.py builds their calls, and calls.py has calls and errors as
data. cancel_safe_transport.py has the connections of the async client.
"""

"""Clients over gRPC, sync and async, and their streams.

client.py has the clients, requests.py builds their calls, calls.py has calls and errors as data,
and stream.py the streams.
"""

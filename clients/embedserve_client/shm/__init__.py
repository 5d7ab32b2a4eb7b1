"""Lookups through shared memory, for clients on the host of the server.

lookups.py runs a lookup, protocol.py has its requests and responses, and regions.py the files.
"""

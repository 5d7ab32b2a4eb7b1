"""Codecs: bytes to LookupRequest and LookupResult to bytes, for each form of them.

Pure functions, no I/O. A codec knows formats, not models: whether features exist and ids are
rows is for the service and the batcher.
"""

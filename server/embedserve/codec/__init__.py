"""Codecs: decode request bytes to a LookupRequest and encode a LookupResult to response bytes.

Codecs are pure functions without I/O. A codec knows formats, not models: the request pipeline and
the batcher check whether features exist and ids are rows.
"""

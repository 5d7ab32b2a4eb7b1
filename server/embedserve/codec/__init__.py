"""Codecs: decode request bytes to a LookupRequest and encode a LookupResult to response bytes.

Codecs do no I/O, except with callers' shared memory, and keep nothing but caches. A decoder knows
formats, not models: the model registry and the batcher check whether features exist and ids are
rows. An encoder takes the names of keys, and what begins each response of a version, from the
ModelInfo of the result.
"""

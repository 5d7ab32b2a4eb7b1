"""Stores behind a URL: remote_store.py lists and loads, pull.py brings a version into a local
cache, upload.py publishes one, and remote_files.py alone knows fsspec.
"""

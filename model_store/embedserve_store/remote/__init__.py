"""Reads and writes stores behind a URL.

remote_store.py lists and loads versions. pull.py copies a version into a local cache, and
damage_record.py delays the next pull of a damaged one. upload.py publishes a version.
multipart_upload.py sends a large file, and unchanged_tables.py finds what the store has of it.
remote_files.py is the only module that uses fsspec, store_errors.py converts its errors, and
retry_log.py logs the retries of botocore.
"""

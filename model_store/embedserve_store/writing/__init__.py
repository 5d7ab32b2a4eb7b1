"""Writes files that appear whole or not at all.

staging.py writes a folder and renames it. direct_file.py writes a file past the page cache.
version_lock.py keeps versions in use from being removed.
"""

"""Writes files that appear whole or not at all.

staging.py writes a folder and renames it. small_files.py writes single files, and direct_file.py
large ones past the page cache.
version_lock.py keeps versions in use from being removed.
"""

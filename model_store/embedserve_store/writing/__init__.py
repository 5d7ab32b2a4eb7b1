"""Files that appear whole or not at all: staging.py writes a folder and renames it, direct_file.py
a file past the page cache. hold.py keeps versions in use from being removed.
"""

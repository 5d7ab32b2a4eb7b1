"""Moves the files of versions between stores, and checks every byte on the way.

file_check.py compares the bytes of a file with the manifest's checksums while they pass.
stored_version.py lists the files of a version and reads them, and receive.py writes them into a
folder. Of a part, part_transfer.py selects the ranges of rows, and sparse_file.py writes them.
remote/ does the same with stores behind a URL.
"""

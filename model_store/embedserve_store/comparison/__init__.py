"""Compares two versions: version_diff.py table by table, and row_diff.py the rows of a table."""

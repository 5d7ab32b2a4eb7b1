"""Copies models from one store to another.

copy_versions.py copies versions with their notes and aliases, and copy_deltas.py the deltas of
their lines.
"""

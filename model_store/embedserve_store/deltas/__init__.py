"""Deltas: rows that changed since a version was published, written by training, read in order.

A line is the sequence of deltas that begins at a version. delta_writer.py appends to it,
delta_line.py reads and checks it, and compact.py publishes it as the next version.
tracked_rows.py takes the rows that training changed from a sharded model.
"""

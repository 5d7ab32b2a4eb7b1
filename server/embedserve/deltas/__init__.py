"""Serves the deltas of a version: rows that change while lookups run, without a lock.

Rows of the version are never written to. A changed row is written to a spare row behind its table
(live_rows.py, the memory that all processes share), and lookups take the number of the last spare
row that belongs to their view (rows_reader.py). One process, the applier, writes (rows_writer.py).
It reads the deltas of all models (follower.py, applier_process.py), and reports how far it is
(status.py). docs/architecture.md has the other files, and the way of a delta. No module here
imports torch.
"""

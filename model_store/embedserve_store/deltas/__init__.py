"""Deltas: rows that changed since a version was published, written by training, read in order.

A line is the sequence of deltas that begins at a version. delta_line.py reads and checks it.

delta_writer.py is the training job's side: push_runner.py runs its pushes, in a thread if wanted.
tracked_rows.py takes the changed rows from a sharded model, by the ids that touched_ids.py reads
from TorchRec's tracker; column_exchange.py puts the rows of column-wise tables together.
encode_changes.py encodes rows, pushed_ids.py and vocabularies.py give rows to new ids, and
pushed_goldens.py makes goldens. line_appender.py writes the delta, with append.py for its manifest
and signing.py for its signature. notify/ notifies servers over a broker.

undo.py takes deltas back, compact.py (with compact_ids.py) publishes a line as the next version,
and prune.py removes old deltas. row_numbers.py collects the row numbers of many files.
"""

"""Deltas in the server: follows the lines of the served versions, and applies changed rows.

One process, the applier, reads the deltas of all models and writes their rows into memory that it
shares with the workers (live_rows.py). follower.py reads a line, status.py tells the workers how
far it is, and applier_process.py is the loop. Never imports torch.
"""

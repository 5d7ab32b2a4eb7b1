"""Batching: joins waiting requests into one batch, and gives each its slice of the answer."""

"""Batching: joins queued requests into one batch and splits its result among them."""

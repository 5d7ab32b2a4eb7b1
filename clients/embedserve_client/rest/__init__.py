"""Clients over REST, sync and async."""

"""Lookups in tables that other servers hold: the router's engine for a model in parts.

Each shard holds a range of rows of the tables. A router looks a batch up in the shards that have
rows of it, over shard_client, and adds their partial sums: router_engine.py is the engine, and
shards.py has the clients. docs/architecture.md names the file of each step.
"""

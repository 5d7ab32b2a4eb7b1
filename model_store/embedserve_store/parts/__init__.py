"""Parts of a version: the rows that one host of a model larger than a host has.

plans/host_plan.py divides the tables into parts. part.py names a part, part_manifest.py derives its
manifest. local_tables.py chooses the tables that routers hold.
"""

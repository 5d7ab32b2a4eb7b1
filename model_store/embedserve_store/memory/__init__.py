"""Controls how tables use memory.

resident_tables.py copies tables into memory. mapped_tables.py populates and releases the pages of
mapped tables. available_memory.py measures the available memory, with the limits that cgroups.py
finds.
"""

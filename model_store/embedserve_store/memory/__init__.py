"""Tables held in memory instead of mapped: resident_tables.py copies them there, and
available_memory.py tells how much there is.
"""

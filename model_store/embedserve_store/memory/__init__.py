"""Tables held in memory instead of mapped: resident_tables.py copies them there, mapped_tables.py
reads those that stay mapped, and available_memory.py tells how much there is.
"""

"""Turns callers' ids into row numbers.

vocabulary.py reads the ids of a table with the rule "map", and string_hashes.py hashes strings.
id_map.py stores the ids, and id_index.py looks them up. translate.py turns the ids of a whole batch
into rows by the rule of each table (format/id_rule.py).
"""

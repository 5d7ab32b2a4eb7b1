"""How callers' ids become row numbers: vocabulary.py reads the ids that a rule "map" knows,
id_map.py stores them (string_hashes.py for strings, id_index.py finds them), and translate.py turns
the ids of a whole batch into rows by the rule of each table (format/id_rule.py).
"""

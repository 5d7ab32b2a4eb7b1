"""How callers' ids become row numbers: rules.py has the rule of a table, vocabulary.py reads the
ids that a rule "map" knows, id_map.py stores them (id_index.py finds them), and translate.py turns
the ids of a whole batch into rows.
"""

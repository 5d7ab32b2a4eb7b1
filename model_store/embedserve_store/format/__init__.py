"""What the files of a version are: manifest.py, manifest_file.py and seal.py are about
manifest.json, layout.py about what of it callers know, coverage.py about what
of it was compared with the training model, table_spec.py and id_rule.py about a table
in it (json_fields.py reads any), tables_file.py about
tables.safetensors (row_layout.py about the bytes of a row, safetensors_file.py about the
container), and version_folder.py about the rest.
"""

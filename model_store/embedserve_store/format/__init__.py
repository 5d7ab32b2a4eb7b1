"""Defines the files of a version, and of its aliases and notes.

manifest.py and manifest_checksum.py define manifest.json. table_spec.py and id_rule.py define a
table in it, and json_fields.py reads fields of any JSON. layout.py defines the layout of a model
that callers depend on. coverage.py records the comparison with the training model. tables_file.py
defines tables.safetensors, row_layout.py the bytes of a row, and safetensors_file.py the container.
version_folder.py names the folders of versions, and alias.py and note.py define the files beside
them, and event.py those of the history. delta_manifest.py, delta_file.py, changed_ids.py,
delta_goldens.py and signature.py define a delta. table_groups.py groups tables that share features,
and text_limit.py bounds texts of people. regular_file.py rejects paths that are not regular files.
"""

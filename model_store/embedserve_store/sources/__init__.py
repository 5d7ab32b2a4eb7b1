"""Reads the rows that a version is made of.

checkpoint.py opens a checkpoint (torch_file.py, dcp.py with dcp_metadata.py, safetensors_source.py)
or a state dict (state_dict.py); file_rows.py reads the rows of files. live.py and live_dmp.py read
modules, and prefix.py selects a collection. rows.py defines the interface of all sources.
description.py reads the fields that a checkpoint does not hold. description_draft.py drafts them,
by the tables that expected_tables.py recognizes in a training model's outputs.
"""

"""Reads the rows that a version is made of.

checkpoint.py opens a checkpoint (torch_file.py, dcp.py, safetensors_source.py) or a state dict
(state_dict.py). live.py and live_dmp.py read modules. rows.py defines the interface of all sources.
description.py reads the fields that a checkpoint does not hold.
"""

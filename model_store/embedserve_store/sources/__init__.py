"""Where rows come from: checkpoint.py opens what training wrote (torch_file.py, dcp.py,
safetensors_source.py, state_dict.py), live.py and live_dmp.py take modules, rows.py is what all
of them give, and description.py reads what a checkpoint does not hold.
"""

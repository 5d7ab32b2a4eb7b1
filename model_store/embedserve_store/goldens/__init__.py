"""Goldens: sample inputs of a model with the results that they must have.

sampled_bags.py samples the inputs, reference_pooling.py computes their results, and goldens_file.py
stores both. parity.py compares the results of a server or publisher with them. expected.py reads
and writes inputs and outputs of a training model. row_checksums.py computes checksums of rows.
delta_parity.py compares the goldens of a delta.
"""

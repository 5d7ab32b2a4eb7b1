"""A few inputs and the answers they must get: sampled_bags.py makes the inputs, hand_pooling.py
answers them, goldens_file.py keeps both, and parity.py compares what someone else answers.
"""

"""Files of /dev/shm that callers on this host have ids read from and answers written to.

region.py is one range of a file, regions.py those of all callers and their bounds, place.py where a
tensor lies. They know bytes, not tensors.
"""

"""Models: what is served, under which names."""

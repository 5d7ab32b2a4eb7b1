"""Before a server serves: its ports, its models, and what answers meanwhile."""

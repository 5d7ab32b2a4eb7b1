"""Start of a server: its ports, its models, and the startup server, which answers meanwhile."""

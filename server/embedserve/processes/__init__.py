"""Processes: loads models, wires the parts of a server, supervises workers, drains."""

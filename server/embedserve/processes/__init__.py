"""Server processes: loading models, wiring the parts of a server, supervising workers, draining."""

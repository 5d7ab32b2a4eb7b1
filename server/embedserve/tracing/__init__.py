"""What is seen of a request: its id, where its time went, its line in the log, its trace."""

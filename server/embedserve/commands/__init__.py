"""The command line: what each command prints, and the commands that need a server."""

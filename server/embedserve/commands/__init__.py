"""What each command of the command line does: progress and messages for a person."""

"""What a person sees in a terminal: progress, aligned tables, sizes."""

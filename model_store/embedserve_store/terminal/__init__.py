"""Terminal output for people: progress bars, aligned tables, byte sizes."""

"""The console: one page for people. It consists of static files in this package, and shows the data
of the public routes plus the labels of ids."""

"""The console: one page for people, of files that are served as they lie here, and what it is told
beside what all routes tell.
"""

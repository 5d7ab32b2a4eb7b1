"""What is different between two versions: version_diff.py compares them, table by table, and
row_diff.py the rows of one table.
"""

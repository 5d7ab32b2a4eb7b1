"""Makes versions: publish.py checks and plans, publish_source.py takes whatever it is given,
resolve_ids.py settles how ids become rows, version_writer.py writes (tables_writer.py the
rows, direct_file.py past the page cache) into a folder that staging.py makes appear at once, and
pooled_error.py reports.
"""

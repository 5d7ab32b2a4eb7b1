"""Makes versions: publish.py checks and plans, publish_source.py takes whatever it is given,
resolve_ids.py settles how ids become rows, version_writer.py writes, pooled_error.py reports.
"""

"""Makes versions: publish.py checks and plans, publish_source.py takes whatever it is given,
resolve_ids.py settles how ids become rows, version_writer.py writes (tables_writer.py the
rows), and pooled_error.py reports; publish_sharded.py does so from all ranks of a training.
expected_answers.py holds a description to what write_expected.py wrote of the training model;
set_alias.py and remove_versions.py change what a store says of its versions.
"""

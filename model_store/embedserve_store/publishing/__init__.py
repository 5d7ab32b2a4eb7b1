"""Publishes versions, and changes their aliases and notes.

publish.py checks the model and plans its shards, by the options in options.py. publish_source.py
reads any kind of source, resolve_ids.py resolves how ids become rows, and previous_version.py
compares the version before. version_writer.py writes the files, with tables_writer.py for the rows
and part_digests.py for the checksums of parts; pooled_error.py measures the loss of precision.
publish_sharded.py publishes from all ranks of a training job, which ranks.py keeps in step.
write_expected.py writes the outputs of a training model, and expected_answers.py checks a
description against them. set_alias.py changes aliases, add_note.py adds notes, and
remove_versions.py removes versions. added_file.py adds the small files of aliases, notes and
deltas, and record_event.py those of the history.
"""

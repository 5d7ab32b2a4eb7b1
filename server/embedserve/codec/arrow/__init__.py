"""Arrow streams: decodes columns of ids to a LookupRequest and encodes vectors as columns.

Streams are read and written at the byte level, without Arrow's library. Data from untrusted clients
is read only by numpy and by checked positions. The schemas that most callers repeat are cached, not
parsed again.

flatbuffers.py has the tables that messages consist of, schema.py the columns, and stream.py the
messages. requests.py decodes requests, and responses.py encodes responses. (arrow.apache.org,
"Arrow Columnar Format")
"""

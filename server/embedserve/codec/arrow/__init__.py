"""Arrow's streams: columns of ids to a LookupRequest, vectors to columns.

A stream is read and written by its bytes, without Arrow's library: what strangers send is looked at
by checked positions and numpy alone, and of a request as most callers send it nothing is parsed
twice. flatbuffers.py has the tables that messages are made of, schema.py the columns, stream.py the
messages; requests.py and answers.py are the codec. (arrow.apache.org, "Arrow Columnar Format")
"""

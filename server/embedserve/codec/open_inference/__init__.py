"""The Open Inference Protocol's requests and responses.

tensors.py defines features as tensors, and outputs.py the outputs of a response. For REST,
bodies.py decodes requests and body_responses.py encodes responses. For gRPC, infer_messages.py and
message_responses.py do so.

json_template.py and message_template.py read requests that equal an earlier request except for
their numbers. shared_memory_template.py reads requests that equal an earlier request and have their
numbers in shared memory. shared_memory_tensors.py reads all other tensors there, and outputs.py
writes them. template_cache.py, beside this package, caches the templates.
"""

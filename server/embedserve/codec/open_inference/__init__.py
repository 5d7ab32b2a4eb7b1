"""The Open Inference Protocol's forms of requests, answers and descriptions, pure functions.

tensors.py says what features are as tensors, and answers.py what answers are. REST's requests are
read by bodies.py, and its answers written by body_answers.py; gRPC's by messages.py and
message_answers.py. known_bodies.py and known_messages.py read what is as a request before it, but
for its numbers; known_placed.py what is as one before it, its numbers in shared memory; known.py
keeps them. description.py has what is told of models.
"""

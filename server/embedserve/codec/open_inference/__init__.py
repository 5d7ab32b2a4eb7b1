"""The Open Inference Protocol's forms of requests, answers and descriptions, pure functions.

tensors.py says what features are as tensors, and answers.py what answers are; bodies.py has both in
REST's bodies, messages.py in gRPC's, and description.py has what is told of models.
"""

"""The code that both clients share.

batch.py makes a request's arrays of the caller's features; bags.py reads those of one feature, and
columns.py other libraries' columns and tensors. messages.py converts arrays from and to the wire
contract, result.py holds the vectors, and models.py describes served models. retry_loop.py runs an
operation by the policy in retries.py. addresses.py, deadline.py, routing.py and security.py handle
one argument of the clients each.
"""

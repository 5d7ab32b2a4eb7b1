"""Options of the gRPC channels of the tests."""

OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
"""Gives each channel a connection of its own.

Otherwise the channels of a process share connections by address. After a port is used again, a new
channel then fails with the error that an older channel met while no server listened there.
"""

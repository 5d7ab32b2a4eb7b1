"""The command line over a model store: publish, inspect, alias, prune and so on.

A command raises StoreError as the function of embedserve_store does that it calls, also if a store,
model, version or file does not exist, cannot be read or is damaged. Further errors are described at
the commands.
"""

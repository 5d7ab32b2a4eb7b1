"""The command line over a model store: publish, inspect, alias, prune and so on."""

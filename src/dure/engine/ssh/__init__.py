"""A run on hosts that are reached by ssh: start an agent on each, watch them, take them down together."""

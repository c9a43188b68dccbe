"""Whether this node does what dure promises, shown by running it: one report to read, one object to send."""

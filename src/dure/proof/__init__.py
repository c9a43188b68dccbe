"""Whether replicas are the same bits, and what those bits depend on."""

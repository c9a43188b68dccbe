"""Several nodes, one team: the leader's agent decides, every node's agent obeys."""

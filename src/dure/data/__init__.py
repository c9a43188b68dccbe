"""Which sample goes to which shard, rank and batch, and the random seeds of each."""

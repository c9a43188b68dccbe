"""One replica's step: forward and backward per shard, the update, evaluation, and the checks before the first step."""

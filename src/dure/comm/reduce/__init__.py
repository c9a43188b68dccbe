"""Gradients through the tree: a local stack of subtrees, the DDP hook, and the exchange behind it."""

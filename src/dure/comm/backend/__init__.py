"""The torch.distributed backend "dure": collectives through shared memory on one node, through Gloo elsewhere."""

"""Pretrained weights: what is in a file, and which of the model's tensors each part of it belongs to."""

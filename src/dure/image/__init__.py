"""The image that ranks run in: build it, prove it, mount into it, run in it."""

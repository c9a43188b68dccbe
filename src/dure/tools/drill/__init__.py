"""A fire drill for a job: run it undisturbed, then once for every fault, and compare the bits."""

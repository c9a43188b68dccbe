"""What differs between CPUs and accelerators: copies and hashes of raw memory."""

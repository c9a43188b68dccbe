"""Checkpoints: what the next step depends on, saved whole, found again, and trusted only when verified."""

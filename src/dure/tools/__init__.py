"""Commands made of the rooms below: bench, demo, drill, lab."""

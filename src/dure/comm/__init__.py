"""Groups of ranks: joining, and small collectives with a deadline that say who is missing."""

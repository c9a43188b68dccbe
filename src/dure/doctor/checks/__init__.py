"""The checks, each a small function that looks at one thing and returns what it found."""

"""The demo: 400 drawn photos, a small network that tells cats from the rest, and the job that trains it."""

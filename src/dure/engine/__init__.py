"""Whose machines a run uses: this one, hosts over ssh, Slurm's nodes."""

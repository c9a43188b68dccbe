"""Jobs on Slurm: the batch script, submitting it, asking how it goes, ending it. No torch."""

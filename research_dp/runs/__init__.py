"""The folder of a run: what is in it, written and read here and nowhere else."""

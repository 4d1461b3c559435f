"""Starting runs: on this machine, in an allocation, and as jobs of SLURM."""

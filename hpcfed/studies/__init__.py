"""Many runs of one file: comparisons and sweeps, on groups of ranks side by side."""

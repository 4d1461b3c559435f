"""Ranks: what the rest of the package knows of them, what MPI gives, and what happens when one is lost."""

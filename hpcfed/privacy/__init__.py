"""Record-level privacy: what an epoch costs, how much noise a budget needs, what was spent, and whether it is true."""

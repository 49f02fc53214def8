"""What strategies would cost: rows of a plan, advice, limits, other numbers of devices."""

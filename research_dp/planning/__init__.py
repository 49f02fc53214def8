"""What strategies would cost: rows of a plan, the least they could send, advice, budgets."""

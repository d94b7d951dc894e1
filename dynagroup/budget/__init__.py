"""Does a batch fit? One monotone question, and the budgets that answer it."""

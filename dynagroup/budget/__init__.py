"""Budgets, which decide whether a batch fits."""

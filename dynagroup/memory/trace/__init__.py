"""Runs a model without data to learn how its memory depends on the batch."""

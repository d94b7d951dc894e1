"""Decides which samples and batches one optimizer step uses, and how much each batch weighs."""

"""Measures the lengths of samples, and makes batches of texts."""

"""Measurements that the documentation cites, and what they need."""

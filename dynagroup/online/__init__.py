"""The same, when lengths are known only after processing."""

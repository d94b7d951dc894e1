"""Forms batches and updates when lengths are known only after processing."""

"""Forms batches and updates while loading, for samples whose lengths are known only after processing."""

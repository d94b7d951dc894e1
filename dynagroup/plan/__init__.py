"""Plans which samples share a batch, when every length is known."""

"""Code that runs a model to learn its memory."""

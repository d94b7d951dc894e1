"""Runs a whole dataset through a model: into memory or into a file, and on after a kill."""

from dynagroup.jobs.inference import (
    classify_dataset,
    embed_dataset,
    encode,
    generate_dataset,
    iter_classify,
    iter_embed,
    iter_generate,
)

__all__ = [
    "classify_dataset",
    "embed_dataset",
    "encode",
    "generate_dataset",
    "iter_classify",
    "iter_embed",
    "iter_generate",
]

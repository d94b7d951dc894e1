"""Runs a whole dataset through a model or any function: into memory or into a file, and on after a kill."""

from dynagroup.jobs.inference import (
    classify_dataset,
    embed_dataset,
    generate_dataset,
    iter_classify,
    iter_embed,
    iter_generate,
)
from dynagroup.jobs.mapping import map_batches

__all__ = [
    "classify_dataset",
    "embed_dataset",
    "generate_dataset",
    "iter_classify",
    "iter_embed",
    "iter_generate",
    "map_batches",
]

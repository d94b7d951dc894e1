"""Runs a whole dataset through a model or any function: into memory or into a file, and on after a kill."""

from dynagroup.jobs.inference import (
    classify_dataset,
    embed_dataset,
    generate_dataset,
    iter_classify,
    iter_embed,
    iter_generate,
    iter_score,
    score_dataset,
)
from dynagroup.jobs.mapping import iter_map, map_batches

__all__ = [
    "classify_dataset",
    "embed_dataset",
    "generate_dataset",
    "iter_classify",
    "iter_embed",
    "iter_generate",
    "iter_map",
    "iter_score",
    "map_batches",
    "score_dataset",
]

"""Runs a whole dataset through a model or any function: into memory or into a file, and on after a kill."""

from dynagroup.jobs.classifying import classify_dataset, iter_classify
from dynagroup.jobs.embedding import embed_dataset, iter_embed
from dynagroup.jobs.generating import generate_dataset, iter_generate
from dynagroup.jobs.mapping import iter_map, map_batches
from dynagroup.jobs.scoring import iter_score, score_dataset

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

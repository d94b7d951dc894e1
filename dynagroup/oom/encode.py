"""Texts to vectors in one line, also with models that say how they want to be pooled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.lengths import named_tokenizer
from dynagroup.oom.dataset import Pooling, embed_dataset

__all__ = ["encode"]

# what sentence-transformers calls it -> what it is here
_POOLINGS: dict[str, Pooling] = {"cls_token": "first", "mean_tokens": "mean", "lasttoken": "last"}
_POOLINGS |= {"cls": "first", "mean": "mean"}


def encode(
    model: Any,
    texts: Sequence[str],
    *,
    tokenizer: Any = None,
    batch_size: int = 32,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    max_length: int | None = None,
    output: str | Path | None = None,
    device: Any = None,
    progress: bool = True,
) -> np.ndarray:
    """One vector a text, float32 (num_texts, features), in batches as large as the ``batch_size`` longest texts' memory.

    A folder or name is loaded; if it was made for sentence-transformers, its own pooling, normalisation and longest input
    are used, so that vectors are those that ``SentenceTransformer(model).encode(texts)`` gives.

    Args:
        model: folder or name, or a loaded transformers model (then with its ``tokenizer``).
        pooling: default: what the folder says, else "mean".
        normalize: scale vectors to length 1; default: what the folder says, else no.
        max_length: default: what the folder says, else what model and tokenizer are made for.
        device: where a model that is loaded here goes; default: a GPU if there is one.
        output: as for :func:`~dynagroup.embed_dataset`.

    Raises:
        ConfigError: the folder asks for something else than pooling and normalising; or no tokenizer.

    >>> encode("sentence-transformers/all-MiniLM-L6-v2", texts).shape  # doctest: +SKIP
    (1000, 384)
    """
    said = _Recipe()
    if isinstance(model, (str, Path)):
        said = _recipe_of(str(model))
        model, tokenizer = _load(str(model), tokenizer, device)
    if tokenizer is None:
        raise ConfigError("`tokenizer` is needed with a model that is loaded already")
    return embed_dataset(
        model,
        tokenizer,
        texts,
        pooling=pooling or said.pooling,
        normalize=said.normalize if normalize is None else normalize,
        batch_size=batch_size,
        max_length=max_length or said.max_length,
        output=output,
        progress=progress,
    )


@dataclass(frozen=True)
class _Recipe:
    pooling: Pooling = "mean"
    normalize: bool = False
    max_length: int | None = None


def _load(name: str, tokenizer: Any, device: Any) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModel

    place = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModel.from_pretrained(name).eval().to(place)
    return model, tokenizer if tokenizer is not None else named_tokenizer(name)


def _recipe_of(name: str) -> _Recipe:
    """What a folder of sentence-transformers says; the default for any other."""
    modules = _read(name, "modules.json")
    if modules is None:
        return _Recipe()
    kinds = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
    unknown = sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"})
    if unknown:
        raise ConfigError(
            f"{name!r} puts {', '.join(unknown)} after its model, which encode() does not run; use sentence-transformers, or "
            "embed_dataset() and do it yourself"
        )
    limit = (_read(name, "sentence_bert_config.json") or {}).get("max_seq_length")
    pooling = _pooling(name, _read(name, f"{kinds['Pooling']}/config.json") or {}) if "Pooling" in kinds else "mean"
    return _Recipe(pooling, "Normalize" in kinds, limit)


def _pooling(name: str, config: dict[str, Any]) -> Pooling:
    asked = [key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on]
    asked += [mode for mode in [config.get("pooling_mode")] if isinstance(mode, str)]
    if len(asked) != 1 or asked[0] not in _POOLINGS:
        raise ConfigError(
            f"{name!r} pools by {asked or config!r}, which encode() does not; give `pooling` and use embed_dataset"
        )
    return _POOLINGS[asked[0]]


def _read(name: str, file: str) -> Any:
    from transformers.utils.hub import cached_file

    path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))

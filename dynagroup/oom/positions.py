"""How long an input a model takes."""

from __future__ import annotations

from typing import Any

__all__ = ["last_position", "longest_input"]

_UNSET = 10**9  # tokenizers that were told no limit say 10**30


def longest_input(model: Any, tokenizer: Any) -> int | None:
    """Tokens that model and tokenizer were made for, the least of what they say; None if they say nothing."""
    config = _text_config(model)
    said = [getattr(tokenizer, "model_max_length", None), getattr(config, "max_position_embeddings", None)]
    known = [int(n) for n in (*said, last_position(model)) if isinstance(n, (int, float)) and 0 < n < _UNSET]
    return min(known, default=None)


def last_position(model: Any) -> int | None:
    """Tokens for which a model has learned positions: its table ends there. None for models that compute positions."""
    stated = getattr(_text_config(model), "max_position_embeddings", None)
    for name, module in model.named_modules():
        rows, last = getattr(module, "num_embeddings", None), name.rpartition(".")[2]
        if rows is None or stated is None or not ("position" in last or last == "wpe") or not 0 <= rows - stated <= 8:
            continue
        offset = getattr(module, "offset", None)  # OPT, BART: the first rows are not used
        if offset is None:
            offset = 0 if getattr(module, "padding_idx", None) is None else module.padding_idx + 1  # RoBERTa
        return int(rows - offset) if rows > offset else None
    return None


def _text_config(model: Any) -> Any:
    config = getattr(model, "config", None)
    narrow = getattr(config, "get_text_config", None)
    return config if narrow is None else narrow()

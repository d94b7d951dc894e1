"""What a job's results depend on: two jobs that differ in anything named here are different jobs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dynagroup.fingerprint import described, hashed

if TYPE_CHECKING:
    import torch

__all__ = ["identity_of"]

_AT_ONCE = 2**24  # elements widened to int64 at a time
_WHERE_FROM = {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "_from_model_config"}
_HOW = {"use_cache", "attn_implementation", "_attn_implementation", "dtype", "torch_dtype"}  # no matter of the results
_CHANGES = {"training", "gradient_checkpointing", "is_gradient_checkpointing", "name_or_path", "warnings_issued"}
_CHANGES |= {"hf_device_map", "max_seq_len_cached"}  # as a model is run, or with the place where it runs
_PROBES = ["A quick brown fox.", "Ein süßer Käse, 1,024 €", "\u4f60\u597d, def f(x): return x ** 2\n"]


def identity_of(model: Any, tokenizer: Any, texts: Iterable[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Texts, weights, configurations, tokenizer, arguments, as JSON: equal in every process, wherever the model was loaded.

    Cost: weights are read once (a few seconds for billions of parameters), texts too.
    """
    return {
        "model": f"{type(model).__name__} {_digest(_weights(model))}",
        "model's switches": _digest(_switches(model)),
        "model's config": _setting(getattr(model, "config", None)),
        "model's generation_config": _setting(getattr(model, "generation_config", None)),
        "tokenizer": _tokenizer(tokenizer),
        "texts": f"{len(texts := list(texts))} texts {_digest(texts)}",
        **{name: _setting(value) for name, value in settings.items()},
    }


def _digest(parts: Iterable[str]) -> str:
    """Each with its length first: "ab", "c" is not "a", "bc"."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return f"#{digest.hexdigest()}"


def _setting(value: Any) -> str | int | None:
    if value is None or type(value) in (int, str):
        return value
    return described({k: _said(v) for k, v in value.items()} if isinstance(value, Mapping) else _said(value))


def _said(config: Any) -> Any:
    """A configuration as what it says; anything else as it is."""
    if not hasattr(config, "to_dict"):
        return config
    return {k: v for k, v in config.to_dict().items() if v is not None and k not in _WHERE_FROM | _HOW}


def _tokenizer(tokenizer: Any) -> str:
    """Its rules or at least its vocabulary, its special tokens, and what it makes of some words."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(backend, "to_str"):  # of a fast tokenizer; truncation and padding are left there by each call
        rules: Any = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
    else:
        rules = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, "get_vocab") else None
    special = [getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id", "truncation_side")]
    return f"{type(tokenizer).__name__} #{hashed(repr((rules, special, tokenizer(_PROBES)['input_ids'])))}"


# What weights do not say: which adapter is active, whether it is switched off or merged, its scaling, a temperature. Such
# settings are plain values of modules. A private one belongs to the framework, except in the layers of peft.
def _switches(model: Any) -> Iterator[str]:
    for name, module in model.named_modules():
        private = type(module).__module__.partition(".")[0] == "peft"
        for key, value in sorted(vars(module).items()):
            if key not in _CHANGES and (private or not key.startswith("_")) and _is_plain(value):
                yield f"{name}.{key}={value!r}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return _is_plain([*value, *value.values()])
    return (
        all(map(_is_plain, value))
        if isinstance(value, (list, tuple))
        else isinstance(value, (type(None), int, float, str))
    )


# Weights are compared by checksums, since they may be many and on a device. A checksum after Fletcher: elements read as
# integers are summed, and summed once more times their odd places, modulo 2**64. A changed element changes the first sum,
# elements that change places the second. Reads everything once, widens at most 2**24 elements at a time.
def _weights(model: Any) -> Iterator[str]:
    for name, tensor in sorted(model.state_dict().items()):
        if hasattr(tensor, "element_size"):
            yield f"{name} {tensor.dtype} {tuple(tensor.shape)} {list(_checksums(tensor))}"


def _checksums(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    import torch

    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for part in tensor.detach().reshape(-1).view(kinds[tensor.element_size()]).split(_AT_ONCE):
        wide = part.to(torch.int64)
        places = torch.arange(1, 2 * len(wide), 2, device=wide.device)
        yield int(wide.sum()), int((wide * places).sum())

"""What a job is, so that results of another one are never taken for its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dynagroup.fingerprint import described, hashed

if TYPE_CHECKING:
    import torch

__all__ = ["identity_of"]

_SIDE = 256  # of the squares that weights are summed over
_AT_ONCE = 2**24  # elements widened to int64 at a time
_WHERE_FROM = {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "_from_model_config"}
_HOW = {"use_cache", "attn_implementation", "_attn_implementation", "dtype", "torch_dtype"}  # no matter of the results
_CHANGES = {"training", "gradient_checkpointing", "is_gradient_checkpointing", "name_or_path", "warnings_issued"}
_CHANGES |= {"hf_device_map", "max_seq_len_cached"}  # as a model is run, or with the place where it runs
_PROBES = ["A quick brown fox.", "Ein süßer Käse, 1,024 €", "\u4f60\u597d, def f(x): return x ** 2\n"]


def identity_of(
    model: Any, tokenizer: Any, texts: Iterable[str], settings: Mapping[str, Any]
) -> dict[str, str | int | None]:
    """Everything that results depend on, as JSON: texts, weights, configurations, tokenizer, arguments.

    Equal in every process, wherever the model was loaded from; two jobs that differ in anything named here differ.
    Cost: weights are read once (a few seconds for billions of parameters), texts too.
    """
    texts = list(texts)
    return {
        "model": f"{type(model).__name__} {_weights(model)}",
        "model's switches": _switches(model),
        "model's config": _config(getattr(model, "config", None)),
        "model's generation_config": _config(getattr(model, "generation_config", None)),
        "tokenizer": _tokenizer(tokenizer),
        "texts": _texts(texts),
        **{name: _setting(value) for name, value in settings.items()},
    }


def _setting(value: Any) -> str | int | None:
    if value is None or type(value) in (int, str):
        return value
    if isinstance(value, Mapping):
        return described({name: _plain(part) for name, part in value.items()})
    return described(value)


def _plain(value: Any) -> Any:
    """A configuration as what it says; anything else as it is."""
    return _said(value) if hasattr(value, "to_dict") else value


def _said(config: Any) -> dict[str, Any]:
    return {
        name: part for name, part in config.to_dict().items() if part is not None and name not in _WHERE_FROM | _HOW
    }


def _config(config: Any) -> str | None:
    if config is None:
        return None
    return hashed(described(_said(config) if hasattr(config, "to_dict") else config))


def _texts(texts: list[str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)  # its length first: "ab", "c" is not "a", "bc"
    return f"{len(texts)} texts #{digest.hexdigest()}"


def _tokenizer(tokenizer: Any) -> str:
    """Its rules or at least its vocabulary, its special tokens, and what it makes of some words."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(
        backend, "to_str"
    ):  # of a fast tokenizer; truncation and padding are left there by each call
        rules: Any = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
    else:
        rules = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, "get_vocab") else None
    special = [getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id", "truncation_side")]
    return f"{type(tokenizer).__name__} #{hashed(repr((rules, special, tokenizer(_PROBES)['input_ids'])))}"


# What weights do not say: which adapter is active, whether it is switched off or merged, its scaling, a temperature. Such
# settings are plain values of modules. A private one belongs to the framework, except in the layers of peft.
def _switches(model: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, module in model.named_modules():
        private = type(module).__module__.partition(".")[0] == "peft"
        for key, value in sorted(vars(module).items()):
            if key not in _CHANGES and (private or not key.startswith("_")) and _is_plain(value):
                digest.update(f"{name}.{key}={value!r};".encode())
    return f"#{digest.hexdigest()}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, str)


def _weights(model: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        if not hasattr(tensor, "element_size"):
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        for part in _sums(tensor):
            digest.update(part)
    return f"#{digest.hexdigest()}"


# Weights are compared by sums, since they may be many and on a device: every 256 x 256 elements, read as integers, give
# their row and column sums in int64, and what is left over is taken as it is. A changed element changes two sums, elements
# that change places change at least one unless they form a rectangle of equal differences. Reads everything once, brings
# one 128th of it to the CPU, and widens at most 2**24 elements at a time.
def _sums(tensor: torch.Tensor) -> Iterable[bytes]:
    import torch

    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.reshape(-1).view(kinds[tensor.element_size()])
    whole = len(flat) - len(flat) % _SIDE**2
    for start in range(0, whole, _AT_ONCE):
        squares = flat[start : min(start + _AT_ONCE, whole)].view(-1, _SIDE, _SIDE).to(torch.int64)
        yield from (squares.sum(dim).cpu().numpy().tobytes() for dim in (1, 2))
    yield flat[whole:].cpu().numpy().tobytes()

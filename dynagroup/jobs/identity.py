"""What the results of a job belong to: they are continued only by a job with an equal description."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch

from dynagroup.fingerprint import described, tokenizer_text

_BLOCK_BYTES = 2**26  # of weights that are copied from a device at a time
# Fields of a config that say where a model comes from or how it runs, not what it computes.
_NOT_COMPARED = {
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "transformers_version",
    "_from_model_config",
    "use_cache",
    "attn_implementation",
    "_attn_implementation",
    "dtype",
    "torch_dtype",
    "architectures",
}


def identity_of_model(model: torch.nn.Module) -> dict[str, object]:
    """Returns a model's class with a checksum of its weights, and its configs; equal in every process and place."""
    weights = checksum(_described_weights(model))
    return {
        "model": f"{type(model).__name__} {weights}",
        "model's config": described_setting(getattr(model, "config", None)),
        "model's generation_config": described_setting(getattr(model, "generation_config", None)),
    }


def identity_of_texts(
    tokenizer: object, texts: Sequence[object], settings: Mapping[str, object], identity: object
) -> dict[str, object]:
    """Returns what else results on texts depend on. ``identity``: what the user wants compared."""
    compared = {
        "tokenizer": tokenizer_text(tokenizer),
        "texts": f"{len(texts)} texts {checksum(texts)}",
        "identity": identity,
    }
    for name, value in settings.items():
        compared[name] = described_setting(value)
    return compared


def checksum(parts: Iterable[object]) -> str:
    """Returns a hash of the parts, each in quotes, so that "ab", "c" and "a", "bc" have different hashes."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(ascii(part).encode())
    return f"#{digest.hexdigest()}"


def described_setting(value: Any) -> str | int | None:
    """Returns a setting as a value for JSON."""
    if value is None or type(value) in (int, str):
        return value
    if not hasattr(value, "to_dict"):
        return described(value)
    fields = {}
    for name, setting in value.to_dict().items():
        if setting is not None and name not in _NOT_COMPARED:
            fields[name] = setting
    return described(fields)


def _described_weights(model: torch.nn.Module) -> Iterator[str]:
    for name, value in sorted(model.state_dict().items()):
        for tensor in _plain_tensors(value):
            bits = tensor.detach().reshape(-1).view(torch.uint8)
            checksums = [crc32(block.cpu().numpy().data) for block in bits.split(_BLOCK_BYTES)]
            yield f"{name} {tensor.dtype} {tuple(tensor.shape)} {checksums}"


def _plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields what a weight consists of: torch's quantized layers hold tuples, torchao's tensors are made of others."""
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _plain_tensors(part)
    elif hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value.dequantize() if value.is_quantized else value

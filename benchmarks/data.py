"""Lengths and samples that benchmarks share: real lengths in ``benchmarks/lengths``, drawn ones, and data sets of them.

Nothing here is of the library, so that who judges what it did may use it.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

LENGTHS = Path(__file__).parent / "lengths"
FILES = tuple(sorted(path.stem for path in LENGTHS.glob("*.npz")))
CV_ONE = "synth_sharegpt4o"
"""The file whose lengths vary by about their mean."""


def lengths_of(name: str, most: int | None = None, column: str = "tokens") -> np.ndarray:
    """At most so many lengths of a file, drawn with a seed."""
    lengths = np.load(LENGTHS / f"{name}.npz")[column]
    drawn = np.random.default_rng(0).permutation(lengths)[:most]
    return np.maximum(drawn, 1).astype(np.int32)


def pairs_of(name: str, most: int) -> dict[str, np.ndarray] | None:
    """Source and target lengths of the same samples; None where the file has none."""
    if "tgt_tokens" not in np.load(LENGTHS / f"{name}.npz"):
        return None
    return {
        "tokens": lengths_of(name, most, "src_tokens"),
        "target": lengths_of(name, most, "tgt_tokens"),
    }


def lognormal(
    count: int,
    *,
    mean: float = 500.0,
    cv: float = 1.0,
    shortest: int = 1,
    longest: int = 16384,
    seed: int = 0,
) -> np.ndarray:
    sigma = np.sqrt(np.log(1 + cv**2))
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn, shortest, longest).astype(np.int32)


class Numbered(torch.utils.data.Dataset):
    """Sample ``i`` is the token ``i``, as often as it is long, so a batch says which samples it holds.

    Args:
        broken: this sample raises; ``deadly``: this one kills its worker.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        *,
        broken: int | None = None,
        deadly: int | None = None,
    ) -> None:
        self.lengths = [int(length) for length in lengths]
        self.broken = broken
        self.deadly = deadly

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.broken:
            raise KeyError(f"record {index} is broken")
        if index == self.deadly and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        ids = torch.full((self.lengths[index],), index, dtype=torch.int64)
        return sample_of(ids)


def sample_of(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """A sample of a causal model; its labels are its tokens."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def collate(samples: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Padded on the right; labels by -100. What is no tensor is left out: online-dynamic-batching adds counts to samples."""
    batch = {}
    for name, value in samples[0].items():
        if isinstance(value, torch.Tensor):
            rows = [sample[name] for sample in samples]
            padding = -100 if name == "labels" else 0
            batch[name] = pad_sequence(rows, batch_first=True, padding_value=padding)
    return batch


def numbers_of(batch: Mapping[str, torch.Tensor]) -> list[int]:
    """Which samples of :class:`Numbered` a batch holds."""
    return batch["input_ids"][:, 0].tolist()


@cache
def word_tokenizer(words: int) -> Any:
    """Splits at spaces; ``w0``, ``w1``, ... are its tokens from 3 on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[EOS]": 2}
    for word in range(words):
        vocabulary[f"w{word}"] = word + 3
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]"
    )

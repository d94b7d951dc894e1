"""What tests of plans share: lengths as streams, batches as lists, and limits for the files of real lengths."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynagroup import Work

CAPS = {
    "azure_llm_code_2023": 16_384,
    "azure_llm_conv_2023": 16_384,
    "gsm8k": 8_192,
    "hh_rlhf_harmless_test": 8_192,
    "mooncake_conv": 131_072,
    "python_files": 65_536,
    "synth_llava": 8_192,
    "synth_sharegpt4o": 16_384,
    "synth_ultrachat": 16_384,
    "t0_mix_50k": 8_192,
}
"""Tokens of a packed batch, for each file of lengths."""


def streams(tokens: Any, **others: Any) -> dict[str, NDArray[np.int32]]:
    """Lengths of one stream or of several."""
    lengths = {"tokens": tokens, **others}
    return {name: np.asarray(values, np.int32) for name, values in lengths.items()}


def as_lists(batches: Iterable[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def joined(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """The samples of all batches, or the batches of all ranks."""
    return list(chain.from_iterable(lists))


def uneven_rows(rows: Any, tokens: Any, cap: int, *, few: bool) -> list[int]:
    """Rows of packed batches whose work is not equal.

    Equal are batches at most 5 % of the mean apart. Where one sample is more work than the row's mean, the other
    batches must be up to it, or full to the cap; of ``few`` rows the last holds what is left.
    """
    work_of = Work().of_lengths(tokens)
    uneven = []
    for number, row in enumerate(rows):
        work = np.asarray([work_of[batch].sum() for batch in row])
        dearest_sample = max(work_of[batch].max() for batch in row)
        if dearest_sample <= work.mean():
            is_even = np.ptp(work) <= 0.05 * work.mean()
        else:
            filled = np.asarray([tokens[batch].sum() for batch in row])
            is_up_to_it = work >= 0.95 * work.max()
            is_even = few or (is_up_to_it | (filled >= 0.95 * cap)).all()
        if not is_even:
            uneven.append(number)
    return uneven

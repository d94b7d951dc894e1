"""Checks the lengths of samples, which are stored as int32, and the labels of their kinds."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynagroup.errors import ConfigError
from dynagroup.shapes import TOKENS, Streams, check_names
from dynagroup.validation import check_int, explained

LONGEST = int(np.iinfo(np.int32).max)  # largest allowed length of a sample, in tokens


def as_streams(lengths: ArrayLike | Mapping[str, ArrayLike] | Path) -> Streams:
    """Returns lengths as a dict from stream name to an int32 array of shape (num_samples,).

    One integer per sample becomes the stream ``tokens``. A mapping keeps its names; its primary stream is ``tokens``,
    or without that name the first. An int32 array is not copied. A path to a ``.npy`` file is opened as a memory map, a
    ``.npz`` file is read as a mapping. Lengths of 0 are allowed.

    Raises ConfigError if a length is not an integer from 0 to 2**31 - 1 (the message names the sample and its value),
    streams have unequal numbers of samples, or a file has no lengths (the message names the file).

    >>> as_streams([3, 0, 7])["tokens"].dtype
    dtype('int32')
    """
    if isinstance(lengths, (str, Path)):
        return _read(lengths)
    named: Mapping[str, Any] = lengths if isinstance(lengths, Mapping) else {TOKENS: lengths}
    check_names(named)
    streams = {name: _as_int32(values, name) for name, values in named.items()}
    num_samples = {name: len(values) for name, values in streams.items()}
    are_equal = len(set(num_samples.values())) == 1
    if not are_equal:
        raise ConfigError(
            f"the streams of `lengths` have {num_samples} samples; each sample needs a length in all (or 0)"
        )
    return streams


def _read(path: str | Path) -> Streams:
    with explained(
        f"{str(path)!r} cannot be read as lengths in a .npy or .npz file",
        way_out="; measure_files() measures other formats",
    ):
        content = np.load(path, mmap_mode="r")
        return as_streams(content if isinstance(content, np.ndarray) else dict(content))


def _as_int32(values: ArrayLike, name: str) -> NDArray[np.int32]:
    try:
        array = np.asarray(values)
        form = f"an array of shape {array.shape}"
    except (RuntimeError, TypeError, ValueError) as error:  # ragged lists; tensors on a device
        array = np.empty(())
        form = str(error)
    if array.ndim != 1:
        raise ConfigError(
            f"lengths[{name!r}] must be one number per sample, but is {form}; "
            "to measure texts, call measure_lengths()"
        )
    is_whole = array.dtype.kind in "iu"
    if is_whole and 0 <= array.min(initial=0) and array.max(initial=0) <= LONGEST:
        return array.astype(np.int32, copy=False)  # without temporary arrays for a billion lengths
    numbers: Any = array.tolist()
    for index, value in enumerate(numbers):
        if _is_length(value):
            continue
        raise ConfigError(
            f"lengths[{name!r}][{index}] must be a whole number from 0 to {LONGEST}, but is {value!r}; "
            "for fractions, multiply all lengths by 100 and round up, and the budget's limit alike"
        )
    return array.astype(np.int32, copy=False)


def _is_length(value: Any) -> bool:
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool) or not isinstance(number, (int, float, np.floating)):
        return False
    return bool(0 <= number <= LONGEST and number == int(number))


@dataclass(frozen=True, eq=False)
class Kinds:
    """The kind (a label) of every sample, stored as one integer code per sample.

    Args:
        codes: int32 (num_samples,), code of each sample's label.
        labels: the label of each code, in order of first appearance.
    """

    codes: NDArray[np.int32]
    labels: tuple[Any, ...]

    @classmethod
    def read(cls, values: Any, num_samples: int) -> "Kinds":
        """Reads one label per sample; a label is any hashable value that equals its copy. None: all samples are alike.

        ConfigError: a label does not equal its copy or is not hashable, or their number is not ``num_samples``.
        """
        if values is None:
            return cls(np.broadcast_to(np.int32(0), num_samples), (None,))
        labels = values.tolist() if hasattr(values, "tolist") else values
        if isinstance(labels, (str, Mapping)) or not isinstance(labels, Iterable):
            raise ConfigError(f"`kinds` must be one label per sample, but is {values!r:.80}")
        labels = list(labels)
        if len(labels) != num_samples:
            raise ConfigError(
                f"`kinds` has {len(labels)} labels for {num_samples} lengths; give one label per sample"
            )
        distinct = _distinct(labels)
        code_of = dict(zip(distinct, range(num_samples), strict=False))
        codes = np.fromiter(map(code_of.__getitem__, labels), np.int32, num_samples)
        return cls(codes, tuple(distinct) or (None,))


def _distinct(labels: list[Any]) -> list[Any]:
    try:
        distinct = list(dict.fromkeys(labels))
    except TypeError:  # one of them has no hash, and is refused below
        distinct = labels
    for label in distinct:
        if not _equals_its_copy(label):
            index = next(index for index, other in enumerate(labels) if other is label)
            raise ConfigError(
                f"kinds[{index}] must be a label that equals its own copy: a number, a text, None, "
                f"or a tuple of these, but is {label!r:.80}"
            )
    return distinct


def _equals_its_copy(label: Any) -> bool:
    try:
        duplicate = deepcopy(label)
        return hash(duplicate) == hash(label) and bool(duplicate == label)
    except (TypeError, ValueError):
        return False


def by_stream(lengths: Sequence[Any], indices: Sequence[int]) -> Any:
    """Returns lengths of samples by stream (without streams, as they are).

    ConfigError: samples have different streams; the message names them by ``indices``.
    """
    streams_of_sample = [_streams_of(length) for length in lengths]
    for place, streams in enumerate(streams_of_sample):
        if streams != streams_of_sample[0]:
            raise ConfigError(
                "`length_of` must return the same streams for every sample, but returned "
                f"{lengths[0]!r} for sample {indices[0]}, {lengths[place]!r} for sample {indices[place]}"
            )
    if not lengths or not isinstance(lengths[0], Mapping):
        return lengths
    return {name: [length[name] for length in lengths] for name in lengths[0]}


def _streams_of(length: Any) -> frozenset[str] | None:
    return frozenset(length) if isinstance(length, Mapping) else None


def limit_of(max_length: Any) -> int | None:
    """Returns how many tokens of a text are read at most; None: no limit. Limits above 2**31 give None."""
    if max_length is None:
        return None
    if isinstance(max_length, (int, np.integer)) and max_length > LONGEST:
        return None
    return check_int("max_length", max_length)

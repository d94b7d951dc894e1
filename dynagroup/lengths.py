"""How long is a sample? Lengths are measured with the tokenizer that training uses, checked once, int32 from then on."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynagroup.errors import ConfigError
from dynagroup.shapes import TOKENS, Streams, primary
from dynagroup.validation import check_function, check_int

LONGEST = int(np.iinfo(np.int32).max)
"""Tokens of the longest sample that dynagroup counts."""
CHAT = "tokenizer.apply_chat_template(messages, tokenize=False) makes a text of a chat"
Tokenizer: TypeAlias = Callable[..., Any]  # called as those of transformers are
TEXTS_PER_CALL = 1000  # as `datasets` hands to a batched function; fast tokenizers work in parallel inside a call


def as_streams(lengths: ArrayLike | Mapping[str, ArrayLike] | Path) -> Streams:
    """Lengths in the form that dynagroup works with: stream name -> int32 array of shape (num_samples,).

    One whole number a sample is the ``tokens`` stream. A mapping keeps its names; primary is ``tokens``, or where none has
    that name the first. An int32 array is passed on without a copy, a ``.npy`` file (its path) as a memory map; a ``.npz`` file
    is a mapping. Zero lengths are legal.

    Raises:
        ConfigError: a length is no whole number from 0 to 2**31 - 1 (names the sample and its value), or streams differ in
            their number of samples.

    >>> as_streams([3, 0, 7])["tokens"].dtype
    dtype('int32')
    """
    read: Any = _saved(Path(lengths)) if isinstance(lengths, (str, Path)) else lengths
    named: Mapping[str, Any] = read if isinstance(read, Mapping) else {TOKENS: read}
    check_names(named)
    streams = {name: _as_int32(values, name) for name, values in named.items()}
    sizes = {name: len(values) for name, values in streams.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"the streams of `lengths` have {sizes} samples; each needs a length in every stream, or 0")
    return streams


def _saved(path: Path) -> Any:
    if not path.is_file() or path.suffix.lower() not in (".npy", ".npz"):
        raise ConfigError(f"there is no file {str(path)!r} of lengths, .npy or .npz; measure_files() measures others")
    found = np.load(path, mmap_mode="r")
    return found if path.suffix.lower() == ".npy" else dict(found)


def check_names(named: Mapping[str, Any]) -> None:
    """Raises ConfigError where these are no lengths by the names of streams."""
    if not named or not all(isinstance(name, str) for name in named):
        raise ConfigError(f"`lengths` must be one number a sample or such by names of streams, but is of {list(named)}")


def _as_int32(values: ArrayLike, name: str) -> NDArray[np.int32]:
    try:
        array = np.asarray(values)
        found = f"an array of shape {array.shape}"
    except (RuntimeError, TypeError, ValueError) as error:  # ragged lists; tensors of a device, of bfloat16
        array, found = np.empty(()), str(error)
    if array.ndim != 1:
        wanted = f"lengths[{name!r}] must be one number a sample"
        raise ConfigError(f"{wanted}, but is {found}; measure_lengths() measures texts")
    if array.dtype.kind in "iu" and (not len(array) or 0 <= array.min() <= array.max() <= LONGEST):
        return array.astype(np.int32, copy=False)  # a billion of them are looked at without a copy
    if array.dtype.kind in "iuf":
        numbers = array.astype(np.float64)  # in float16 and float32 the limit itself would be rounded up
        legal = (numbers >= 0) & (numbers <= LONGEST) & (np.floor(array) == array)
    else:
        legal = np.fromiter(map(_is_length, array), np.bool_, len(array))
    if not legal.all():
        index = int(np.argmin(legal))
        found = array[index:].tolist()[0]
        raise ConfigError(f"lengths[{name!r}][{index}] must be a whole number from 0 to {LONGEST}, but is {found!r}")
    return array.astype(np.int32, copy=False)


def _is_length(value: Any) -> bool:
    number = value.item() if isinstance(value, (np.integer, np.floating)) else value
    whole = isinstance(number, (int, float)) and not isinstance(number, bool)
    return whole and 0 <= number <= LONGEST and number == int(number)


@dataclass(frozen=True, eq=False)
class Kinds:
    """The kind of each sample: a label, as a code.

    Args:
        codes: int32 (num_samples,), the number of each sample's label.
        labels: the labels, in the order in which they first appear.
    """

    codes: NDArray[np.int32]
    labels: tuple[Any, ...]

    @classmethod
    def read(cls, given: Any, num_samples: int) -> "Kinds":
        """From one label a sample: anything that can be hashed and equals itself. None: all are of the kind None.

        ConfigError: a label cannot be told from others, or there are not as many as samples.

        >>> Kinds.read(["image", None, "image"], 3).codes.tolist()
        [0, 1, 0]
        """
        if given is None:
            return cls(np.zeros(num_samples, np.int32), (None,))
        if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
            raise ConfigError(f"`kinds` must be one label a sample, but is {given!r:.80}")
        labels, numbers = getattr(given, "tolist", lambda: list(given))(), dict[Any, int]()
        if len(labels) != num_samples:
            raise ConfigError(f"`kinds` has {len(labels)} labels, but there are lengths for {num_samples} samples")
        for index, label in enumerate(labels):
            try:
                known = numbers.setdefault(label, new := len(numbers)) < new or deepcopy(label) in numbers
                told_apart = known and bool(label == label)  # noqa: PLR0124  by value, not by identity
            except (TypeError, ValueError):
                told_apart = False
            if not told_apart:
                wanted = "a label that can be told from others, a number, a text or None, or a tuple of such"
                raise ConfigError(f"kinds[{index}] must be {wanted}, but is {label!r:.80}")
        return cls(np.fromiter(map(numbers.__getitem__, labels), np.int32, num_samples), tuple(numbers) or (None,))


def measure_lengths(
    data: Any, tokenizer: Callable[..., Any] | None = None, column: str | None = None,
    max_length: int | None = None, num_proc: int | None = None, *,
    length_of: Callable[[Any], Any] | None = None, progress: bool = True,
) -> Any:  # fmt: skip
    """Tokens of every sample: int32 (N,), in dataset order, with a progress bar.

    Lengths of a ``datasets.Dataset`` are cached where ``datasets`` caches its transforms.

    Args:
        data: texts with a ``tokenizer``; or a ``datasets.Dataset``; or samples that are tokenized already (sequences of
            ids, or mappings that hold one); or any map-style dataset with ``length_of``.
        tokenizer: called as transformers tokenizers are, special tokens included.
        column: of a table, or of samples that are mappings: where the text or the ids are. Default: the only text column
            of a ``datasets.Dataset`` with a tokenizer, ``input_ids`` without.
        max_length: longer samples are truncated to so many tokens, or counted as so many; of several streams the primary one is.
        num_proc: processes to work with; default: this one.
        length_of: sample -> its length, or -> a mapping of stream names to lengths, the primary one ``tokens`` or first:
            the result is then a dict of arrays.
        progress: show the bar (on a terminal).

    Raises:
        ConfigError: a text is none, a length is not a whole number (names the sample and its value), or arguments do not
            go together.

    >>> measure_lengths([[5, 6, 7], [], [8]]).tolist()
    [3, 0, 1]
    >>> measure_lengths(["a b", "c"], length_of=lambda text: len(text.split())).tolist()
    [2, 1]
    """
    if length_of is not None and tokenizer is not None:
        raise ConfigError("`tokenizer` and `length_of` both say how to measure; give one of them")
    workers = 0 if num_proc is None or check_int("num_proc", num_proc) == 1 else num_proc
    if not _is_hf_dataset(data):
        data, column = by_position(data, "data", column), None if _is_table(data) else column
    max_length = limit_of(max_length)
    if length_of is not None:
        check_function("length_of", length_of, "from a sample to its length")
        found = _measure_with(data, length_of, workers, progress)
    elif _is_hf_dataset(data):
        found = _measure_hf(data, tokenizer, column, max_length, num_proc)
    elif tokenizer is not None:
        found = _measure_texts(_values(data, column), tokenizer, max_length, workers, _bar(data, "texts", progress))
    else:
        in_mappings = len(data) > 0 and isinstance(next(iter(data)), Mapping)
        field = (column or "input_ids") if in_mappings else None
        found = _counted(_values(data, field), _id_counts, _bar(data, "samples", progress))
    streams = as_streams(found)
    if max_length is not None:  # a length of text; streams beside it count other things
        streams = {**streams, primary(streams): np.minimum(streams[primary(streams)], np.int32(max_length))}
    return dict(streams) if isinstance(found, Mapping) else streams[TOKENS]


def _bar(data: Sized, unit: str, shown: bool) -> Any:
    from tqdm.auto import tqdm  # None: silent where output is no terminal

    return tqdm(total=len(data), desc="measuring lengths", unit=f" {unit}", disable=None if shown else True)


def _values(data: Any, column: str | None) -> Iterator[Any]:
    return (sample if column is None else sample[column] for sample in data)


def _counted(values: Iterator[Any], count: Callable[[list[Any], int], list[int]], bar: Any) -> list[int]:
    """``count`` is given a chunk, and the index of its first value."""
    counts: list[int] = []
    with bar:
        while chunk := list(islice(values, TEXTS_PER_CALL)):
            counts += count(chunk, len(counts))
            bar.update(len(chunk))
    return counts


def _is_table(data: Any) -> bool:
    return hasattr(data, "columns") and hasattr(data, "shape")  # of pandas, polars or pyarrow


def _is_hf_dataset(data: Any) -> bool:
    datasets = sys.modules.get("datasets")  # whoever holds one has imported it
    return datasets is not None and isinstance(data, datasets.Dataset)


def _measure_texts(texts: Iterator[Any], tokenizer: Tokenizer, max_length: int | None, workers: int, bar: Any) -> Any:
    if not workers:
        return _counted(texts, partial(_token_counts, tokenizer, max_length), bar)
    from datasets import Dataset

    checked = [check_text(text, index) for index, text in enumerate(texts)]
    return _map_counts(Dataset.from_dict({"text": checked}), "text", tokenizer, max_length, workers)


def _token_counts(tokenizer: Tokenizer, max_length: int | None, texts: Sequence[Any], first: int) -> list[int]:
    checked = [check_text(text, index) for index, text in enumerate(texts, first)]
    return [len(ids) for ids in tokenizer(checked, **shortened(max_length))["input_ids"]] if checked else []


def _measure_hf(data: Any, tokenizer: Any, column: str | None, max_length: int | None, num_proc: int | None) -> Any:
    texts = [name for name, kind in data.features.items() if getattr(kind, "dtype", None) in ("string", "large_string")]
    if column is None and tokenizer is not None and len(texts) != 1:
        raise ConfigError(f"the dataset has {len(texts)} text columns ({texts}): name one with `column`")
    name = column or ("input_ids" if tokenizer is None else texts[0])
    if name not in data.column_names:
        raise ConfigError(f"`column` must be one of {data.column_names}, but is {name!r}")
    return _list_lengths(data, name) if tokenizer is None else _map_counts(data, name, tokenizer, max_length, num_proc)


def _map_counts(data: Any, column: str, tokenizer: Tokenizer, max_length: int | None, num_proc: int | None) -> Any:
    def count(batch: Mapping[str, Any], indices: Sequence[int]) -> dict[str, list[int]]:
        return {"length": _token_counts(tokenizer, max_length, list(batch[column]), indices[0])}

    # A first call leaves its truncation setting in a fast tokenizer. Made here, it happens before `datasets` takes the
    # fingerprint of the function, so that the next call finds the cache.
    _token_counts(tokenizer, max_length, ["a"], 0)
    how = {"batched": True, "batch_size": TEXTS_PER_CALL, "with_indices": True, "num_proc": num_proc}
    counted = data.select_columns([column]).map(count, remove_columns=[column], desc="measuring lengths", **how)
    return counted.with_format("numpy")["length"][:] if len(counted) else []


def _list_lengths(data: Any, column: str) -> NDArray[Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    counts = [np.zeros(0, np.int64)]
    for table in data.select_columns([column]).with_format("arrow").iter(batch_size=10 * TEXTS_PER_CALL):
        ids = table.column(0)
        is_list = pa.types.is_list(ids.type) or pa.types.is_large_list(ids.type)
        if not is_list or pa.types.is_nested(ids.type.value_type) or pa.types.is_string(ids.type.value_type):
            said = f"column {column!r} holds {ids.type}, not lists of ids"
            raise ConfigError(f"{said}; give a `tokenizer` for texts; {CHAT}")
        counts.append(pc.call_function("list_value_length", [ids]).to_numpy())  # of None: nan, which is refused
    return np.concatenate(counts)


def count_ids(ids: Any) -> int | None:
    """Tokens of one row of ids, or None for what is no such row: a pair of ids and label, a batch of one, a list of texts.

    >>> count_ids([5, 6, 7]), count_ids(([5, 6, 7], 1)), count_ids(np.zeros((1, 7)))
    (3, None, None)
    """
    if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Sized) or getattr(ids, "ndim", 1) != 1:
        return None
    ends = (ids[0], ids[-1]) if isinstance(ids, (list, tuple)) and ids else ()
    holds_more = (isinstance(end, (str, bytes, Mapping, list, tuple)) or getattr(end, "ndim", 0) > 0 for end in ends)
    return None if any(holds_more) else len(ids)


def _id_counts(rows: Sequence[Any], first: int) -> list[int]:
    counts: list[Any] = list(map(count_ids, rows))
    if None in counts:
        bad = counts.index(None)
        _refuse_chat(rows[bad], first + bad)
        way = "name its `column`, give the `tokenizer` for texts, or `length_of`"
        raise ConfigError(f"sample {first + bad} must be one row of ids, but is {rows[bad]!r:.200}; {way}")
    return counts


def _measure_with(data: Any, length_of: Callable[[Any], Any], workers: int, progress: bool) -> Any:
    from torch.utils.data import DataLoader

    found: list[Any] = []
    with _bar(data, "samples", progress) as bar:
        for chunk in DataLoader(data, batch_size=64, num_workers=workers, collate_fn=partial(_each, length_of)):
            found += chunk
            bar.update(len(chunk))
    if len(found) != len(data):
        why = "`length_of` raised StopIteration, or len() is wrong"
        raise ConfigError(f"{len(found)} of {len(data)} samples were measured: {why}")
    if not found or not isinstance(found[0], Mapping):
        return found
    for index, lengths in enumerate(found):
        if not isinstance(lengths, Mapping) or lengths.keys() != found[0].keys():
            raise ConfigError(f"length_of gave {sorted(found[0])} for sample 0, but {lengths!r} for sample {index}")
    return {name: [lengths[name] for lengths in found] for name in found[0]}


def _each(length_of: Callable[[Any], Any], samples: Sequence[Any]) -> list[Any]:
    return [length_of(sample) for sample in samples]


def limit_of(max_length: Any) -> int | None:
    """How many tokens of a text are read at most; None for all, also where a tokenizer says so by 10**30."""
    if max_length is None or (isinstance(max_length, (int, np.integer)) and max_length > LONGEST):
        return None
    return check_int("max_length", max_length)


def by_position(values: Any, name: str = "texts", column: str | None = None) -> Sequence[Any]:
    """A sequence that an index finds by position, where the labels of a Series of pandas would find others."""
    if _is_table(values) and column is not None:
        values = values[column]
    whole = isinstance(values, (str, bytes, Mapping)) or _is_table(values) or _is_hf_dataset(values)
    if whole or not isinstance(values, Sized):
        given = f"a whole {type(values).__name__}"
        raise ConfigError(f"`{name}` must be a list or one column, but is {given}; for a stream use OnlineDataLoader")
    if hasattr(values, "to_pylist"):  # of pyarrow
        return values.to_pylist()  # pyright: ignore[reportAttributeAccessIssue]
    is_indexed = hasattr(values, "__getitem__") and not hasattr(values, "iloc")
    return cast("Sequence[Any]", values) if is_indexed else list(cast("Iterable[Any]", values))


def check_text(text: Any, index: int) -> str:
    """``text``, if it is one that tokenizers read: UTF-8 cannot write lone surrogates."""
    _refuse_chat(text, index)
    if not isinstance(text, str):
        raise ConfigError(f"text {index} must be a string, but is {text!r:.200}; correct or filter out that sample")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        way_out = "correct or filter out that sample, e.g. text.encode('utf-8', 'replace').decode()"
        raise ConfigError(f"text {index} has a lone surrogate at character {error.start}; {way_out}") from None
    return text


def _refuse_chat(value: Any, index: int) -> None:
    if isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], Mapping):
        raise ConfigError(f"sample {index} is a chat ({value!r:.100}); {CHAT}")


def begun_once(tokenizer: Any, texts: Sequence[Any]) -> Tokenizer:
    """The tokenizer, which adds no special tokens where all texts bring its first one, as chat templates write them."""
    first, number = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "bos_token_id", None)
    begun = bool(first) and len(texts) > 0 and all(isinstance(text, str) and text.startswith(first) for text in texts)
    twice = begun and tokenizer([first])["input_ids"][0][:2] == [number] * 2
    return partial(tokenizer, add_special_tokens=False) if twice else tokenizer


def padded(tokens: Callable[..., Any], texts: Sequence[str], max_length: int | None, **how: Any) -> dict[str, Any]:
    """``input_ids`` and ``attention_mask`` of texts, int64 tensors (num_samples, longest). ``how``: as tokenizers pad."""
    encoded = tokens(list(texts), **shortened(max_length))
    # Texts without any token still need one position: an empty tensor has no dtype that an embedding accepts.
    width: Any = {"padding": "longest"} if any(encoded["input_ids"]) else {"padding": "max_length", "max_length": 1}
    wanted = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    tokenizer: Any = getattr(tokens, "func", tokens)
    return dict(tokenizer.pad(wanted, **width, **how, return_tensors="pt"))


def shortened(max_length: int | None) -> dict[str, Any]:
    """What a tokenizer is told."""
    return {} if max_length is None else {"truncation": True, "max_length": max_length}

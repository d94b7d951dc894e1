"""Measures and checks the lengths of samples, which are stored as int32."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynagroup.errors import ConfigError
from dynagroup.shapes import TOKENS, Streams, check_names, primary
from dynagroup.validation import check_function, check_int, explained, sendable, warn_user

LONGEST = int(np.iinfo(np.int32).max)  # largest allowed length of a sample, in tokens
IDS = ("input_ids", "input_values")  # usual names of fields with one entry per position
MASK = "attention_mask"  # 1 for entries of these fields that count, 0 for padding
LENGTH_OF = "for other samples give `length_of`, e.g. lambda row: len(row['audio']['array'])"
PADDED_ROWS = 0.01  # a larger share of padding in rows is told
CHAT = "turn a chat into a text with tokenizer.apply_chat_template(messages, tokenize=False)"
Tokenizer: TypeAlias = Callable[..., Any]  # called like a transformers tokenizer
TEXTS_PER_CALL = (
    1000  # datasets.map has the same default; a fast tokenizer works in parallel within one call
)


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
        what = f"{str(lengths)!r} cannot be read as lengths in a .npy or .npz file"
        with explained(what, way_out="; measure_files() measures other formats"):
            found = np.load(lengths, mmap_mode="r")
            return as_streams(found if isinstance(found, np.ndarray) else dict(found))
    named: Mapping[str, Any] = lengths if isinstance(lengths, Mapping) else {TOKENS: lengths}
    check_names(named)
    streams = {name: _as_int32(values, name) for name, values in named.items()}
    sizes = {name: len(values) for name, values in streams.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            f"the streams of `lengths` have {sizes} samples; each sample needs a length in all (or 0)"
        )
    return streams


def _as_int32(values: ArrayLike, name: str) -> NDArray[np.int32]:
    try:
        array = np.asarray(values)
        found = f"an array of shape {array.shape}"
    except (
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # ragged lists; tensors on a device or of dtype bfloat16
        array, found = np.empty(()), str(error)
    if array.ndim != 1:
        wanted = f"lengths[{name!r}] must be one number per sample"
        raise ConfigError(f"{wanted}, but is {found}; to measure texts, call measure_lengths()")
    wide = (
        array.dtype != np.int32
    )  # int32 values are small enough, and a billion of them are read only once
    if (
        array.dtype.kind in "iu"
        and 0 <= array.min(initial=0)
        and not (wide and array.max(initial=0) > LONGEST)
    ):
        return array.astype(
            np.int32, copy=False
        )  # without a copy, which matters for a billion lengths
    if array.dtype.kind in "iuf":
        numbers = array.astype(np.float64)  # float16 and float32 would round up the limit itself
        legal = (numbers >= 0) & (numbers <= LONGEST) & (np.floor(array) == array)
    else:
        legal = np.fromiter(map(_is_length, array), np.bool_, len(array))
    if not legal.all():
        index = int(np.argmin(legal))
        found = array[index:].tolist()[0]
        way_out = ""
        if isinstance(found, float) and 0 <= found <= LONGEST:
            way_out = "; for fractions, multiply all lengths by 100 and round up, and the budget's limit alike"
        raise ConfigError(
            f"lengths[{name!r}][{index}] must be a whole number from 0 to {LONGEST}, but is {found!r}{way_out}"
        )
    return array.astype(np.int32, copy=False)


def _is_length(value: Any) -> bool:
    number = value.item() if isinstance(value, (np.integer, np.floating)) else value
    whole = isinstance(number, (int, float)) and not isinstance(number, bool)
    return whole and 0 <= number <= LONGEST and number == int(number)


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
    def read(cls, given: Any, num_samples: int) -> "Kinds":
        """Reads one label per sample; a label is any hashable value that equals its copy. None: all samples are alike.
        ConfigError: a label does not equal its copy or is not hashable, or their number is not ``num_samples``."""
        if given is None:
            return cls(np.broadcast_to(np.int32(0), num_samples), (None,))
        if (
            isinstance(given, (str, Mapping))
            or not isinstance(given, Iterable)
            or not getattr(given, "ndim", 1)
        ):
            raise ConfigError(f"`kinds` must be one label per sample, but is {given!r:.80}")
        labels = getattr(given, "tolist", lambda: list(given))()
        if len(labels) != num_samples:
            raise ConfigError(
                f"`kinds` has {len(labels)} labels for {num_samples} lengths; give one label per sample"
            )
        distinct: Iterable[Any] = labels
        with suppress(TypeError):  # some label is not hashable
            distinct = dict.fromkeys(labels)
        for label in distinct:
            told_apart = False
            with suppress(TypeError, ValueError):
                told_apart = hash(copied := deepcopy(label)) == hash(label) and bool(
                    copied == label
                )  # by value
            if not told_apart:
                wanted = (
                    "a label that equals its own copy: a number, a text, None, or a tuple of these"
                )
                index = next(index for index, other in enumerate(labels) if other is label)
                raise ConfigError(f"kinds[{index}] must be {wanted}, but is {label!r:.80}")
        numbers = {label: number for number, label in enumerate(distinct)}
        return cls(
            np.fromiter(map(numbers.__getitem__, labels), np.int32, num_samples),
            tuple(numbers) or (None,),
        )


def measure_lengths(
    data: Any,
    tokenizer: Callable[..., Any] | None = None,
    column: str | None = None,
    max_length: int | None = None,
    num_proc: int | None = None,
    *,
    length_of: Callable[[Any], Any] | None = None,
    progress: bool = True,
) -> Any:
    """Measures the tokens of every sample; returns int32 (N,) in dataset order, and shows a progress bar.

    Where samples have an ``attention_mask``, the tokens that it marks are counted, and a warning says how much of the rows
    is padding. Several choices of a sample (nested ids) count as their number times the longest, as they are collated.
    ``datasets`` caches the lengths of a ``datasets.Dataset``, as it caches transforms.

    Args:
        data: texts (with a ``tokenizer``), a ``datasets.Dataset``, tokenized samples (sequences of token ids, or
            mappings that contain one), or any map-style dataset (with ``length_of``).
        tokenizer: called like a transformers tokenizer; special tokens are counted.
        column: name of the text or id field of a table, or of samples that are mappings. None: the only text column of
            a ``datasets.Dataset`` if a tokenizer is given, else ``input_ids`` or ``input_values``.
        max_length: int, tokens: texts are truncated to this many, or counted as this many (in the primary stream).
        num_proc: int, number of processes. None: only this process.
        length_of: function from a sample to its length, or to a mapping from stream names to lengths, whose primary
            stream is ``tokens`` or the first. With mappings the result is a dict of arrays.
        progress: True shows the bar on a terminal.

    Raises ConfigError if a text is not a string, a length is not an integer (the message names the sample and its
    value), or both ``tokenizer`` and ``length_of`` are given.

    >>> measure_lengths([[5, 6, 7], [], [8]]).tolist()
    [3, 0, 1]
    >>> measure_lengths(["a b", "c"], length_of=lambda text: len(text.split())).tolist()
    [2, 1]
    """
    if length_of is not None and tokenizer is not None:
        raise ConfigError("`tokenizer` and `length_of` both measure samples; pass only one of them")
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
        found = _measure_texts(
            _values(data, column), tokenizer, max_length, workers, _bar(data, "texts", progress)
        )
    else:
        count = _Samples(data, column)
        found = _counted(_values(data, None), count, _bar(data, "samples", progress))
        count.tell_padding(found)
    streams = as_streams(found)
    if max_length is not None:  # the limit is for text; other streams do not count tokens
        streams = {
            **streams,
            primary(streams): np.minimum(streams[primary(streams)], np.int32(max_length)),
        }
    return dict(streams) if isinstance(found, Mapping) else streams[TOKENS]


def _bar(data: Sized, unit: str, shown: bool) -> Any:
    from tqdm.auto import tqdm  # disable=None hides the bar where output is not a terminal

    return tqdm(
        total=len(data), desc="measuring lengths", unit=f" {unit}", disable=None if shown else True
    )


def _values(data: Any, column: str | None) -> Iterator[Any]:
    return (sample if column is None else sample[column] for sample in data)


def _counted(
    values: Iterator[Any], count: Callable[[list[Any], int], list[int]], bar: Any
) -> list[int]:
    """Applies ``count`` to chunks of values (it also gets the index of a chunk's first value); joins the counts."""
    counts: list[int] = []
    with bar:
        while chunk := list(islice(values, TEXTS_PER_CALL)):
            counts += count(chunk, len(counts))
            bar.update(len(chunk))
    return counts


def _is_table(data: Any) -> bool:
    return hasattr(data, "columns") and hasattr(
        data, "shape"
    )  # tables of pandas, polars or pyarrow


def _is_hf_dataset(data: Any) -> bool:
    datasets = sys.modules.get(
        "datasets"
    )  # not imported here: whoever has a Dataset has imported datasets
    return datasets is not None and isinstance(data, datasets.Dataset)


def _measure_texts(
    texts: Iterator[Any], tokenizer: Tokenizer, max_length: int | None, workers: int, bar: Any
) -> Any:
    if not workers:
        return _counted(texts, partial(_token_counts, tokenizer, max_length), bar)
    from datasets import Dataset

    checked = [check_text(text, index) for index, text in enumerate(texts)]
    return _map_counts(Dataset.from_dict({"text": checked}), "text", tokenizer, max_length, workers)


def _token_counts(
    tokenizer: Tokenizer, max_length: int | None, texts: Sequence[Any], first: int
) -> list[int]:
    checked = [check_text(text, index) for index, text in enumerate(texts, first)]
    return (
        [len(ids) for ids in tokenizer(checked, **shortened(max_length))["input_ids"]]
        if checked
        else []
    )


def _measure_hf(
    data: Any, tokenizer: Any, column: str | None, max_length: int | None, num_proc: int | None
) -> Any:
    texts = [
        name
        for name, kind in data.features.items()
        if getattr(kind, "dtype", None) in ("string", "large_string")
    ]
    if column is None and tokenizer is not None and len(texts) != 1:
        raise ConfigError(
            f"the dataset has {len(texts)} text columns ({texts}); name one with `column`"
        )
    if tokenizer is not None:
        name = texts[0] if column is None else column
    else:
        name = column or next((name for name in IDS if name in data.column_names), IDS[0])
    if name not in data.column_names:
        raise ConfigError(
            f"`column` must be one of {data.column_names}, but is {name!r}; {LENGTH_OF}"
        )
    if tokenizer is not None:
        return _map_counts(data, name, tokenizer, max_length, num_proc)
    rows = row_lengths(data, name)
    marked = _marked(data, name, rows)
    tell_padding(name, int(np.nansum(rows)), int(np.nansum(marked)))
    return marked


def _map_counts(
    data: Any, column: str, tokenizer: Tokenizer, max_length: int | None, num_proc: int | None
) -> Any:
    def count(batch: Mapping[str, Any], indices: Sequence[int]) -> dict[str, list[int]]:
        return {"length": _token_counts(tokenizer, max_length, list(batch[column]), indices[0])}

    # A fast tokenizer's first call changes it: call it before `datasets` takes the fingerprint by which it finds caches.
    _token_counts(tokenizer, max_length, ["a"], 0)
    how = {
        "batched": True,
        "batch_size": TEXTS_PER_CALL,
        "with_indices": True,
        "num_proc": num_proc,
    }
    counted = data.select_columns([column]).map(
        count, remove_columns=[column], desc="measuring lengths", **how
    )
    return counted.with_format("numpy")["length"][:] if len(counted) else []


def row_lengths(data: Any, column: str) -> NDArray[Any]:
    """Returns the ids of each row of a ``datasets.Dataset``, with padding: (N,). Several choices count as their number
    times the longest."""
    import pyarrow.compute as pc

    counts = [np.zeros(0, np.int64)]
    for ids in _arrow_lists(data, column):
        lengths = pc.call_function("list_value_length", [ids]).to_numpy(
            zero_copy_only=False
        )  # None becomes nan, an error
        if _is_list(ids.type.value_type):
            choices = pc.call_function("list_flatten", [ids])
            of_row = pc.call_function("list_parent_indices", [ids]).to_numpy(zero_copy_only=False)
            if lengths.max(initial=0) < 2:
                raise ConfigError(
                    f"column {column!r} must contain lists of token ids, but contains batches of one row; "
                    f"give the row itself; {CHAT}"
                )
            longest = np.zeros(len(lengths), np.int64)
            sizes = pc.call_function("list_value_length", [choices]).to_numpy(zero_copy_only=False)
            np.maximum.at(longest, of_row, sizes)
            lengths = lengths * longest
        counts.append(lengths)
    return np.concatenate(counts)


def _marked(data: Any, column: str, rows: NDArray[Any]) -> NDArray[Any]:
    """Returns the entries of each row that the attention mask marks; without a mask of plain rows, all."""
    import pyarrow.compute as pc

    if column not in IDS or MASK not in data.column_names:
        return rows
    sums = [np.zeros(0, np.int64)]
    for mask in _arrow_lists(data, MASK):
        if mask.null_count or _is_list(mask.type.value_type):
            return rows
        entries = pc.call_function("list_flatten", [mask]).to_numpy(zero_copy_only=False)
        of_row = pc.call_function("list_parent_indices", [mask]).to_numpy(zero_copy_only=False)
        sums.append(np.bincount(of_row, weights=entries, minlength=len(mask)).astype(np.int64))
    return np.minimum(np.concatenate(sums), rows)


def _arrow_lists(data: Any, column: str) -> Iterator[Any]:
    """Yields a column in pyarrow arrays of lists of numbers, or of lists of such lists. ConfigError: it has others."""
    import pyarrow as pa

    table = data.select_columns([column]).with_format("arrow")
    for part in table.iter(batch_size=10 * TEXTS_PER_CALL):
        ids = part.column(0).combine_chunks()
        kind = ids.type
        for _ in range(2):
            kind = kind.value_type if _is_list(kind) else kind
        is_number = pa.types.is_integer(kind) or pa.types.is_null(kind) or pa.types.is_boolean(kind)
        if column == "input_values":
            is_number = is_number or pa.types.is_floating(kind)
        if not _is_list(ids.type) or not is_number:
            raise ConfigError(
                f"column {column!r} must contain lists of token ids, but contains {ids.type}; "
                f"give a `tokenizer` for texts; {CHAT}; {LENGTH_OF}"
            )
        yield ids


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    is_fixed = pa.types.is_fixed_size_list(kind)
    return is_fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)


def tell_padding(column: str, entries: int, marked: int) -> None:
    """Warns if rows are padded in advance. ``entries``: of all rows; ``marked``: those that the attention mask marks."""
    share = (entries - marked) / max(entries, 1)
    if share > PADDED_ROWS:
        warn_user(
            f"your rows are padded in advance: {share:.0%} of {column!r} is padding, by {MASK!r}; tokenize "
            "without padding, and leave padding to the collate function, which pads to the longest of a batch"
        )


def count_ids(ids: Any, *, floats: bool = False) -> int | None:
    """Returns the number of tokens in one row of token ids; None for other data (ids with a label, a batch, texts).
    ``floats``: numbers may be samples of a waveform.

    >>> count_ids([5, 6, 7]), count_ids(([5, 6, 7], 1)), count_ids(np.zeros((1, 7), int))
    (3, None, None)
    """
    if isinstance(ids, (str, bytes, Mapping, tuple)) or not isinstance(ids, Sized):
        return None
    if getattr(ids, "ndim", 1) != 1:
        return None
    row: Any = ids
    ends = [row[0], row[-1]] if len(row) and hasattr(row, "__getitem__") else []
    allowed = (int, float) if floats else int
    are_numbers = (isinstance(getattr(end, "item", lambda end=end: end)(), allowed) for end in ends)
    return len(ids) if all(are_numbers) else None


def _count_choices(ids: Any) -> int | None:
    """Returns the number of choices times the longest; None: ``ids`` is no list of rows of token ids."""
    if isinstance(ids, (str, bytes, Mapping, tuple)) or not isinstance(ids, Iterable):
        return None
    if getattr(ids, "ndim", 2) != 2:
        return None
    counts = [count_ids(choice) for choice in ids]
    if len(counts) < 2 or None in counts:  # a single row is a batch of one
        return None
    return len(counts) * max(cast("list[int]", counts))


class _Samples:
    """Counts the tokens of tokenized samples: rows of ids, or mappings with such a field and perhaps a mask."""

    def __init__(self, data: Any, column: str | None) -> None:
        first = next(iter(data), None) if len(data) > 0 else None
        self._column = column
        if column is None and isinstance(first, Mapping):
            self._column = next((name for name in IDS if name in first), IDS[0])
        self._entries = 0

    def __call__(self, samples: Sequence[Any], first: int) -> list[int]:
        return [self._count(sample, index) for index, sample in enumerate(samples, first)]

    def _count(self, sample: Any, index: int) -> int:
        ids = sample
        mask = None
        if self._column is not None:
            if not isinstance(sample, Mapping) or self._column not in sample:
                fields = sorted(sample) if isinstance(sample, Mapping) else type(sample).__name__
                raise ConfigError(
                    f"sample {index} has no {self._column!r} (it has {fields}); name its `column`; {LENGTH_OF}"
                )
            ids = sample[self._column]
            mask = sample.get(MASK) if self._column in IDS else None
        count = count_ids(ids, floats=self._column == "input_values")
        if count is None and self._column is not None:
            count = _count_choices(ids)
            mask = None
        if count is None:
            _refuse_chat(ids, index)
            raise ConfigError(
                f"sample {index} must be one row of token ids (1-D, whole numbers), but is {ids!r:.200}; name its "
                "`column`, give the `tokenizer` for texts, or give `length_of`, for several choices a sample: "
                "number of choices * longest"
            )
        self._entries += count
        return count if mask is None else min(int(np.sum(np.asarray(mask))), count)

    def tell_padding(self, counts: Sequence[int]) -> None:
        tell_padding(str(self._column), self._entries, sum(counts))


def _measure_with(data: Any, length_of: Callable[[Any], Any], workers: int, progress: bool) -> Any:
    from torch.utils.data import DataLoader

    found: list[Any] = []
    with _bar(data, "samples", progress) as bar:
        for chunk in DataLoader(
            data, batch_size=64, num_workers=workers, collate_fn=partial(_each, length_of)
        ):
            found += chunk
            bar.update(len(chunk))
    if len(found) != len(data):
        why = "the dataset raised StopIteration, or its len() is wrong; correct it"
        raise ConfigError(f"only {len(found)} of {len(data)} samples were measured, because {why}")
    return by_stream(found, range(len(found)))


def by_stream(found: Sequence[Any], indices: Sequence[int]) -> Any:
    """Returns lengths of samples by stream (without streams, as they are). ConfigError: samples have different streams."""
    names = [frozenset(lengths) if isinstance(lengths, Mapping) else None for lengths in found]
    other = next((number for number, own in enumerate(names) if own != names[0]), None)
    if other is not None:
        same = (
            f"`length_of` must return the same streams for every sample, but returned {found[0]!r}"
        )
        raise ConfigError(
            f"{same} for sample {indices[0]}, {found[other]!r} for sample {indices[other]}"
        )
    return (
        {name: [lengths[name] for lengths in found] for name in found[0]}
        if {*names} - {None}
        else found
    )


@sendable(lambda: "length_of failed")
def _each(length_of: Callable[[Any], Any], samples: Sequence[Any]) -> list[Any]:
    return [length_of(sample) for sample in samples]


def limit_of(max_length: Any) -> int | None:
    """Returns how many tokens of a text are read at most; None: no limit. Limits above 2**31 give None."""
    if max_length is None or (isinstance(max_length, (int, np.integer)) and max_length > LONGEST):
        return None
    return check_int("max_length", max_length)


def by_position(values: Any, name: str = "texts", column: str | None = None) -> Sequence[Any]:
    """Returns ``values`` as a sequence that is indexed by position (a pandas Series would be indexed by its labels)."""
    if _is_table(values) and column is not None:
        values = values[column]
    whole = isinstance(values, (str, bytes, Mapping)) or _is_table(values) or _is_hf_dataset(values)
    if whole or not isinstance(values, Sized):
        given = f"a whole {type(values).__name__}"
        raise ConfigError(
            f"`{name}` must be a list or one column, but is {given}; for a stream use OnlineDataLoader"
        )
    if hasattr(values, "to_pylist"):  # a pyarrow column
        return values.to_pylist()  # pyright: ignore[reportAttributeAccessIssue]
    is_indexed = hasattr(values, "__getitem__") and not hasattr(values, "iloc")
    return cast("Sequence[Any]", values) if is_indexed else list(cast("Iterable[Any]", values))


def check_text(text: Any, index: int) -> str:
    """Returns ``text`` if a tokenizer can read it: a str without lone surrogates, which UTF-8 cannot encode."""
    _refuse_chat(text, index)
    if not isinstance(text, str):
        raise ConfigError(
            f"text {index} must be a string, but is {text!r:.200}; correct or filter out that sample"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        way_out = "correct or filter out that sample, e.g. text.encode('utf-8', 'replace').decode()"
        raise ConfigError(
            f"text {index} has a lone surrogate at character {error.start}; {way_out}"
        ) from None
    return text


def _refuse_chat(value: Any, index: int) -> None:
    if isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], Mapping):
        raise ConfigError(
            f"sample {index} must be a text or token ids, but is a chat ({value!r:.100}); {CHAT}"
        )


def begun_once(tokenizer: Any, texts: Sequence[Any]) -> Tokenizer:
    """Returns the tokenizer; if all texts already start with its BOS token, set to add no special tokens."""
    first, number = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "bos_token_id", None)
    begun = (
        bool(first)
        and len(texts) > 0
        and all(isinstance(text, str) and text.startswith(first) for text in texts)
    )
    twice = begun and tokenizer([first])["input_ids"][0][:2] == [number] * 2
    return partial(tokenizer, add_special_tokens=False) if twice else tokenizer


def padded(
    tokens: Callable[..., Any], texts: Sequence[str], max_length: int | None, **how: Any
) -> dict[str, Any]:
    """Returns padded ``input_ids`` and ``attention_mask``, int64 (num_samples, longest). ``how``: passed to ``pad``."""
    encoded = tokens(list(texts), **shortened(max_length))
    # Texts without any token are padded to one position, because an embedding refuses the dtype of an empty tensor.
    width: Any = (
        {"padding": "longest"}
        if any(encoded["input_ids"])
        else {"padding": "max_length", "max_length": 1}
    )
    wanted = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    tokenizer: Any = getattr(tokens, "func", tokens)
    return dict(tokenizer.pad(wanted, **width, **how, return_tensors="pt"))


def shortened(max_length: int | None) -> dict[str, Any]:
    """Returns the arguments that make a tokenizer truncate to ``max_length`` tokens; no arguments for None."""
    return {} if max_length is None else {"truncation": True, "max_length": max_length}

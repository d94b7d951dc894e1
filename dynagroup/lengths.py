"""Sample lengths: measured with the tokenizer that training uses, checked once, then kept as int32."""

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
from dynagroup.validation import check_function, check_int, explained

LONGEST = int(np.iinfo(np.int32).max)  # the largest length that a sample may have, in tokens
CHAT = "tokenizer.apply_chat_template(messages, tokenize=False) makes a text of a chat"
Tokenizer: TypeAlias = Callable[..., Any]  # called like a transformers tokenizer
TEXTS_PER_CALL = 1000  # the default batch of datasets.map; a fast tokenizer runs in parallel inside a call


def as_streams(lengths: ArrayLike | Mapping[str, ArrayLike] | Path) -> Streams:
    """Convert lengths to the form that dynagroup works with: stream name -> int32 array of shape (num_samples,).

    One integer per sample becomes the stream ``tokens``. A mapping keeps its names; the primary stream is ``tokens``,
    or the first one if none has that name. An int32 array is not copied. A path to a ``.npy`` file is read as a memory
    map, a ``.npz`` file as a mapping. Lengths of 0 are allowed.

    Raises:
        ConfigError: a length is not an integer from 0 to 2**31 - 1 (the message names the sample and its value),
            streams differ in their number of samples, or a file holds no lengths (the message names it).

    >>> as_streams([3, 0, 7])["tokens"].dtype
    dtype('int32')
    """
    if isinstance(lengths, (str, Path)):
        what = f"{str(lengths)!r} cannot be read as lengths, .npy or .npz"
        with explained(what, way_out="; measure_files() measures other files"):
            found = np.load(lengths, mmap_mode="r")
            return as_streams(found if isinstance(found, np.ndarray) else dict(found))
    named: Mapping[str, Any] = lengths if isinstance(lengths, Mapping) else {TOKENS: lengths}
    check_names(named)
    streams = {name: _as_int32(values, name) for name, values in named.items()}
    sizes = {name: len(values) for name, values in streams.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"the streams of `lengths` have {sizes} samples; each needs a length in every stream, or 0")
    return streams


def check_names(named: Mapping[str, Any]) -> None:
    """Raise ConfigError unless ``named`` maps names of streams to lengths."""
    if not named or not all(isinstance(name, str) for name in named):
        raise ConfigError(f"`lengths` must be a number for each sample, or a dict of streams, but has {list(named)}")


def _as_int32(values: ArrayLike, name: str) -> NDArray[np.int32]:
    try:
        array = np.asarray(values)
        found = f"an array of shape {array.shape}"
    except (RuntimeError, TypeError, ValueError) as error:  # ragged lists; tensors on a device, or of bfloat16
        array, found = np.empty(()), str(error)
    if array.ndim != 1:
        wanted = f"lengths[{name!r}] must be one number a sample"
        raise ConfigError(f"{wanted}, but is {found}; measure_lengths() measures texts")
    if array.dtype.kind in "iu" and (not len(array) or 0 <= array.min() <= array.max() <= LONGEST):
        return array.astype(np.int32, copy=False)  # a billion lengths are checked without a copy
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
    """The kind of each sample: its label, stored as an integer code.

    Args:
        codes: int32 (num_samples,), the code of each sample's label.
        labels: the label of each code, in order of first appearance.
    """

    codes: NDArray[np.int32]
    labels: tuple[Any, ...]

    @classmethod
    def read(cls, given: Any, num_samples: int) -> "Kinds":
        """Read one label per sample, any value that can be hashed and equals itself. None: all are of the kind None.

        ConfigError: a label cannot be told from others, or the number of labels is not the number of samples.
        """
        if given is None:
            return cls(np.broadcast_to(np.int32(0), num_samples), (None,))
        if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
            raise ConfigError(f"`kinds` must be one label a sample, but is {given!r:.80}")
        labels = getattr(given, "tolist", lambda: list(given))()
        if len(labels) != num_samples:
            raise ConfigError(f"`kinds` has {len(labels)} labels, but there are lengths for {num_samples} samples")
        try:
            distinct: Iterable[Any] = dict.fromkeys(labels)
        except TypeError:  # one of them cannot be hashed
            distinct = labels
        for label in distinct:
            try:
                copied = deepcopy(label)
                told_apart = hash(copied) == hash(label) and bool(copied == label)  # by value, not by identity
            except (TypeError, ValueError):
                told_apart = False
            if not told_apart:
                wanted = "a label that can be told from others, a number, a text or None, or a tuple of such"
                index = next(index for index, other in enumerate(labels) if other is label)
                raise ConfigError(f"kinds[{index}] must be {wanted}, but is {label!r:.80}")
        numbers = {label: number for number, label in enumerate(distinct)}
        return cls(np.fromiter(map(numbers.__getitem__, labels), np.int32, num_samples), tuple(numbers) or (None,))


def measure_lengths(
    data: Any, tokenizer: Callable[..., Any] | None = None, column: str | None = None,
    max_length: int | None = None, num_proc: int | None = None, *,
    length_of: Callable[[Any], Any] | None = None, progress: bool = True,
) -> Any:  # fmt: skip
    """Measure the tokens of every sample: int32 (N,), in dataset order, with a progress bar.

    The lengths of a ``datasets.Dataset`` are cached by ``datasets``, like its transforms.

    Args:
        data: texts (with a ``tokenizer``), a ``datasets.Dataset``, tokenized samples (sequences of ids, or mappings
            that hold one), or any map-style dataset (with ``length_of``).
        tokenizer: called like a transformers tokenizer; special tokens count.
        column: where the text or the ids are in a table, or in samples that are mappings. Default: the only text column
            of a ``datasets.Dataset`` with a tokenizer, ``input_ids`` without.
        max_length: longer samples are truncated to this many tokens, or count as this many, in the primary stream.
        num_proc: number of processes; default: only this one.
        length_of: function from a sample to its length, or to a mapping from stream names to lengths, whose primary
            stream is ``tokens`` or the first. A mapping makes the result a dict of arrays.
        progress: show the bar (on a terminal).

    Raises:
        ConfigError: a text is not a string, a length is not an integer (the message names the sample and its value), or
            two arguments contradict each other.

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
        found = _measure_texts(_values(data, column), tokenizer, max_length, workers, _bar(data, "texts", progress))
    else:
        in_mappings = len(data) > 0 and isinstance(next(iter(data)), Mapping)
        field = (column or "input_ids") if in_mappings else None
        found = _counted(_values(data, field), _id_counts, _bar(data, "samples", progress))
    streams = as_streams(found)
    if max_length is not None:  # it limits text only; other streams count other things
        streams = {**streams, primary(streams): np.minimum(streams[primary(streams)], np.int32(max_length))}
    return dict(streams) if isinstance(found, Mapping) else streams[TOKENS]


def _bar(data: Sized, unit: str, shown: bool) -> Any:
    from tqdm.auto import tqdm  # disable=None hides the bar where output is not a terminal

    return tqdm(total=len(data), desc="measuring lengths", unit=f" {unit}", disable=None if shown else True)


def _values(data: Any, column: str | None) -> Iterator[Any]:
    return (sample if column is None else sample[column] for sample in data)


def _counted(values: Iterator[Any], count: Callable[[list[Any], int], list[int]], bar: Any) -> list[int]:
    """Apply ``count`` to chunks of values. Its second argument is the index of the first value in the chunk."""
    counts: list[int] = []
    with bar:
        while chunk := list(islice(values, TEXTS_PER_CALL)):
            counts += count(chunk, len(counts))
            bar.update(len(chunk))
    return counts


def _is_table(data: Any) -> bool:
    return hasattr(data, "columns") and hasattr(data, "shape")  # of pandas, polars or pyarrow


def _is_hf_dataset(data: Any) -> bool:
    datasets = sys.modules.get("datasets")  # whoever holds a Dataset has imported datasets
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

    # The first call stores its truncation setting in a fast tokenizer. This call does so before `datasets` takes the
    # fingerprint of `count`, so that a later run finds the cache.
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
        counts.append(pc.call_function("list_value_length", [ids]).to_numpy())  # None becomes nan, which is refused
    return np.concatenate(counts)


def count_ids(ids: Any) -> int | None:
    """Number of tokens in one row of ids. None for anything else: a pair of ids and label, a batch of one, texts.

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
    """How many tokens of a text are read at most. None: no limit; limits above 2**31, such as 10**30, count as none."""
    if max_length is None or (isinstance(max_length, (int, np.integer)) and max_length > LONGEST):
        return None
    return check_int("max_length", max_length)


def by_position(values: Any, name: str = "texts", column: str | None = None) -> Sequence[Any]:
    """``values`` as a sequence that is indexed by position; a pandas Series would be indexed by its labels."""
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
    """Return ``text`` if tokenizers can read it: a string without lone surrogates, which UTF-8 cannot encode."""
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
    """The tokenizer, set to add no special tokens if all texts begin with its BOS token already (chat templates)."""
    first, number = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "bos_token_id", None)
    begun = bool(first) and len(texts) > 0 and all(isinstance(text, str) and text.startswith(first) for text in texts)
    twice = begun and tokenizer([first])["input_ids"][0][:2] == [number] * 2
    return partial(tokenizer, add_special_tokens=False) if twice else tokenizer


def padded(tokens: Callable[..., Any], texts: Sequence[str], max_length: int | None, **how: Any) -> dict[str, Any]:
    """Padded ``input_ids`` and ``attention_mask``, int64 (num_samples, longest). ``how``: for ``pad``."""
    encoded = tokens(list(texts), **shortened(max_length))
    # Texts without any token still need one position: an empty tensor has no dtype that an embedding accepts.
    width: Any = {"padding": "longest"} if any(encoded["input_ids"]) else {"padding": "max_length", "max_length": 1}
    wanted = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    tokenizer: Any = getattr(tokens, "func", tokens)
    return dict(tokenizer.pad(wanted, **width, **how, return_tensors="pt"))


def shortened(max_length: int | None) -> dict[str, Any]:
    """Arguments that make a tokenizer truncate to ``max_length`` tokens."""
    return {} if max_length is None else {"truncation": True, "max_length": max_length}

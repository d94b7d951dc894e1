"""Lengths of samples: measured once, checked once, int32 from then on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import cached_property, partial
from itertools import islice
from typing import Any, cast, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynagroup.errors import ConfigError
from dynagroup.shapes import TOKENS, Streams, TokensCalled, said
from dynagroup.validation import check_function, check_int

__all__ = [
    "BegunOnce",
    "as_streams",
    "as_texts",
    "count_ids",
    "limit_of",
    "measure_lengths",
    "named_tokenizer",
    "with_tokens",
]

LONGEST = int(np.iinfo(np.int32).max)
TEXTS_PER_CALL = (
    1000  # as many as `datasets` hands to a batched function; fast tokenizers work in parallel inside a call
)


def as_streams(lengths: ArrayLike | Mapping[str, ArrayLike]) -> Streams:
    """Lengths in the form that dynagroup works with: stream name -> int32 array of shape (num_samples,).

    An int32 array is checked and passed on without a copy. Zero lengths are legal.

    Args:
        lengths: one whole number a sample (array, list, tensor, column), or a mapping of stream names to such;
            a bare array is the ``tokens`` stream. Of a mapping without one the first stream is taken for it:
            ``{"source": ..., "target": ...}`` has its source under ``tokens``.

    Raises:
        ConfigError: a length is negative, fractional, NaN, above 2**31 - 1 or not a number (names the sample and its
            value), or streams differ in their number of samples.

    >>> as_streams([3, 0, 7])["tokens"].dtype
    dtype('int32')
    >>> sorted(as_streams({"tokens": [3, 4], "patches": [0, 9]}))
    ['patches', 'tokens']
    """
    named = with_tokens(lengths) if isinstance(lengths, Mapping) else {TOKENS: lengths}
    streams = {name: _as_int32(_as_array(values, said(name)), said(name)) for name, values in named.items()}
    num_samples = len(streams[TOKENS])
    for name, values in streams.items():
        if len(values) != num_samples:
            raise ConfigError(
                f"lengths[{name!r}] has {len(values)} samples, but lengths[{said(next(k for k in named if k == TOKENS))!r}] has "
                f"{num_samples}: sample "
                f"{min(len(values), num_samples)} is missing; every sample needs a length in every stream, or 0"
            )
    return streams


def with_tokens(named: Mapping[str, Any]) -> dict[str, Any]:
    """The streams, the first of them under ``tokens`` where none has that name.

    >>> with_tokens({"source": [3], "target": [2]})
    {'tokens': [3], 'target': [2]}
    """
    if not named:
        raise ConfigError("`lengths` has no stream; give one number a sample, or a mapping of stream names to such")
    unnamed = [name for name in named if not isinstance(name, str)]
    if unnamed:
        raise ConfigError(f"`lengths` names its streams by texts, but one is named {unnamed[0]!r}")
    first = TOKENS if TOKENS in named else next(iter(named))
    return {TokensCalled(name) if name == first != TOKENS else name: values for name, values in named.items()}


def _as_array(values: ArrayLike, name: str) -> NDArray[np.generic]:
    try:
        array = np.asarray(values)
    except ValueError:  # ragged lists
        array = np.empty(0)
        ragged = True
    else:
        ragged = False
    if ragged or array.ndim != 1:
        found = "ragged lists" if ragged else f"an array of shape {array.shape}"
        raise ConfigError(
            f"lengths[{name!r}] must be one number a sample, but is {found}; "
            "measure_lengths() measures texts and token lists"
        )
    return array.astype(np.int32) if array.size == 0 else array


def _as_int32(array: NDArray[np.generic], name: str) -> NDArray[np.int32]:
    kind = array.dtype.kind
    if kind in "iu":
        legal = len(array) == 0 or (int(array.min()) >= 0 and int(array.max()) <= LONGEST)  # pyright: ignore[reportArgumentType]
    elif kind == "f":
        legal = bool(_whole(array).all())
    else:
        legal = False
    if not legal:
        _refuse(array, name)
    return array.astype(np.int32, copy=False)


def _whole(array: NDArray[np.generic]) -> NDArray[np.bool_]:
    return (array >= 0) & (array <= LONGEST) & (np.floor(array) == array)  # pyright: ignore


def _refuse(array: NDArray[np.generic], name: str) -> None:
    if array.dtype.kind in "iuf":
        index = int(np.argmin(_whole(array)))
    else:
        index = next((i for i, value in enumerate(array.tolist()) if not _is_length(value)), 0)
    raise ConfigError(
        f"lengths[{name!r}][{index}] must be a whole number from 0 to {LONGEST}, but is {array.tolist()[index]!r}; "
        "correct or filter out that sample"
    )


def _is_length(value: object) -> bool:
    whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    return whole and 0 <= value <= LONGEST and value == int(value)  # type: ignore[operator,arg-type]


@overload
def measure_lengths(
    data: Any,
    tokenizer: Callable[..., Any] | None = None,
    column: str | None = None,
    max_length: int | None = None,
    num_proc: int | None = None,
    *,
    length_of: Callable[[Any], Mapping[str, int]],
    progress: bool = True,
) -> dict[str, NDArray[np.int32]]: ...
@overload
def measure_lengths(
    data: Any,
    tokenizer: Callable[..., Any] | None = None,
    column: str | None = None,
    max_length: int | None = None,
    num_proc: int | None = None,
    *,
    length_of: Callable[[Any], int] | None = None,
    progress: bool = True,
) -> NDArray[np.int32]: ...
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
    """Tokens of every sample: int32 (N,), in dataset order, with a progress bar.

    Args:
        data: texts with a ``tokenizer``; or a ``datasets.Dataset``; or samples that are tokenized already (sequences of
            ids, or mappings that hold one); or any map-style dataset with ``length_of``.
        tokenizer: called as transformers tokenizers are, special tokens included.
        column: of a ``datasets.Dataset`` or of samples that are mappings: where the text or the ids are. Default:
            the only text column with a tokenizer, ``input_ids`` without.
        max_length: longer samples are truncated to so many tokens, or counted as so many; other streams than ``tokens`` are not.
        num_proc: processes to work with; default: this one.
        length_of: sample -> its length, or -> a mapping of stream names to lengths (``tokens`` among them): the result
            is then a dict of arrays.
        progress: show the bar (on a terminal).

    Lengths of a ``datasets.Dataset`` are cached where ``datasets`` caches its transforms.

    Raises:
        ConfigError: a text is None or not a string, a length is not a whole number (names the sample and its value), or
            arguments do not go together.

    >>> measure_lengths([[5, 6, 7], [], [8]]).tolist()
    [3, 0, 1]
    >>> measure_lengths(["a b", "c"], length_of=lambda text: len(text.split())).tolist()
    [2, 1]
    """
    _check_arguments(data, column, num_proc)
    data, column = _by_position(data, column)
    max_length = limit_of(max_length)
    disable = None if progress else True  # tqdm: None is silent where output is no terminal
    if length_of is not None:
        check_function("length_of", length_of, "from a sample to its length")
        if tokenizer is not None:
            raise ConfigError("`tokenizer` and `length_of` both say how to measure; give one of them")
        found = _measure_with(data, length_of, num_proc or 0, disable)
    elif _is_hf_dataset(data):
        found = _measure_hf(data, tokenizer, column, max_length, num_proc)
    elif tokenizer is not None:
        texts = data if column is None else _Field(data, column)
        found = _measure_texts(texts, tokenizer, max_length, num_proc, disable)
    else:
        found = _measure_ids(data, column or "input_ids", disable)
    streams = as_streams(found)
    if max_length is not None:  # a length of text; streams beside it count other things
        streams = {**streams, TOKENS: np.minimum(streams[TOKENS], np.int32(max_length))}
    return dict(streams) if isinstance(found, Mapping) else streams[TOKENS]


def limit_of(max_length: Any) -> int | None:
    """How many tokens of a text are read at most; None for all, also where a tokenizer says so by 10**30.

    Raises:
        ConfigError: it is no such number.

    >>> limit_of(512), limit_of(10**30), limit_of(None)
    (512, None, None)
    """
    if max_length is None or (isinstance(max_length, (int, np.integer)) and max_length > LONGEST):
        return None
    return check_int("max_length", max_length)


def count_ids(ids: Any) -> int | None:
    """Tokens of one row of ids, or None for what is no such row: a pair of ids and label, a batch of one, a list of texts.

    >>> count_ids([5, 6, 7]), count_ids(([5, 6, 7], 1)), count_ids(np.zeros((1, 7)))
    (3, None, None)
    """
    if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Sized) or getattr(ids, "ndim", 1) != 1:
        return None
    nested = isinstance(ids, (list, tuple)) and len(ids) > 0 and (_holds_more(ids[0]) or _holds_more(ids[-1]))
    return None if nested else len(ids)


def _holds_more(item: Any) -> bool:
    return isinstance(item, (str, bytes, Mapping, list, tuple)) or getattr(item, "ndim", 0) > 0


def as_texts(texts: Any) -> Sequence[Any]:
    """Texts that an index finds by position. Labels, as a Series of pandas has them, would find others.

    Raises:
        ConfigError: it is one text, a table, or has no length; says what to give instead.

    >>> as_texts({"a": 1, "b": 2}.keys())
    ['a', 'b']
    """
    if isinstance(texts, (str, bytes)):
        raise ConfigError(f"`texts` must be a sequence of texts, but is one {type(texts).__name__}; put it into a list")
    if _is_hf_dataset(texts) or isinstance(texts, Mapping) or hasattr(texts, "columns"):
        raise ConfigError(
            f"`texts` must be a sequence of texts, but is a whole {type(texts).__name__}; give one column of it, e.g. "
            "texts['text']"
        )
    if not isinstance(texts, Sized):
        raise ConfigError(
            f"`texts` must have a length, but is {type(texts).__name__}; give list(texts), or for a stream OnlineDataLoader"
        )
    by_position = hasattr(texts, "__getitem__") and not hasattr(texts, "iloc")
    return cast("Sequence[Any]", texts) if by_position else list(cast("Iterable[Any]", texts))


class BegunOnce:
    """A tokenizer that adds no special tokens to texts that bring its first one, as its ``apply_chat_template`` does not.

    Args:
        tokenizer: a transformers tokenizer; one that would not begin such a text twice is called as it is.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, texts: Sequence[str], **options: Any) -> Mapping[str, list[list[int]]]:
        """``input_ids`` and ``attention_mask`` of every text."""
        begun = [bool(self._first) and text.startswith(self._first) for text in texts]
        if not any(begun):
            return self._tokenizer(texts, **options)
        found: dict[str, list[list[int]]] = {"input_ids": [[]] * len(texts), "attention_mask": [[]] * len(texts)}
        for adds in {not is_begun for is_begun in begun}:
            at = [i for i, is_begun in enumerate(begun) if is_begun != adds]
            encoded = self._tokenizer([texts[i] for i in at], add_special_tokens=adds, **options)
            for name, values in found.items():
                for i, ids in zip(at, encoded[name], strict=True):
                    values[i] = ids
        return found

    @cached_property
    def _first(self) -> str:
        """The first token as it is written, if a text that begins with it would be begun twice; else an empty text."""
        written, number = (getattr(self._tokenizer, name, None) for name in ("bos_token", "bos_token_id"))
        return written if written and self._tokenizer([written])["input_ids"][0][:2] == [number] * 2 else ""


def named_tokenizer(name: str) -> Any:
    """The transformers tokenizer of that name or folder.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except ImportError:  # a tokenizer's own package: its message says which
        raise
    except Exception as error:  # whatever a hub, a folder's files or a tokenizer's own code raise
        raise ConfigError(
            f"no tokenizer found for {name!r}; give the name of a transformers tokenizer, or a folder with its files"
        ) from error


def _check_arguments(data: Any, column: Any, num_proc: int | None) -> None:
    if column is not None and not isinstance(column, str):
        raise ConfigError(f"`column` must be the name of a column, but is {column!r}")
    if num_proc is not None:
        check_int("num_proc", num_proc)
    if isinstance(data, (str, bytes, Mapping)):
        raise ConfigError(f"`data` must be a sequence of samples, but is one {type(data).__name__}; put it into a list")
    if not isinstance(data, Sized):
        raise ConfigError(
            f"`data` must have a length, but is {type(data).__name__}; for a stream use OnlineDataLoader, "
            "which measures samples as they arrive"
        )


def _by_position(data: Any, column: str | None) -> tuple[Any, str | None]:
    """``data`` whose samples an index finds by position, where a table finds columns and a Series labels."""
    if hasattr(data, "columns") and hasattr(data, "shape"):  # of pandas, polars or pyarrow
        names = list(getattr(data, "column_names", data.columns))
        if column not in names:
            raise ConfigError(
                f"`data` is a whole {type(data).__name__}: name with `column` where its texts or ids are, one of {names}; "
                f"`column` is {column!r}"
            )
        values = data[column]
        return (values.to_pylist() if hasattr(values, "to_pylist") else list(values)), None
    return (list(data) if hasattr(data, "iloc") else data), column


class _Field(Sequence[Any]):
    """One field of samples that are mappings."""

    def __init__(self, data: Any, field: str) -> None:
        self._data, self._field = data, field

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: Any) -> Any:
        sample = self._data[index]
        try:
            return sample[self._field]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"sample {index} must be a mapping with {self._field!r}, but is {sample!r:.200}; name the field with `column`"
            ) from error


def _chunks(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(values)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _check_texts(texts: Sequence[Any], first: int) -> None:
    for index, text in enumerate(texts, first):
        if not isinstance(text, str):
            chat = isinstance(text, list) and len(text) > 0 and isinstance(text[0], Mapping)
            way_out = "tokenizer.apply_chat_template(messages, tokenize=False, ...) makes one of a chat" if chat else ""
            raise ConfigError(
                f"text {index} must be a string, but is {text!r}; {way_out or 'correct or filter out that sample'}"
            )


def _token_counts(texts: Sequence[Any], first: int, tokenizer: Callable[..., Any], max_length: int | None) -> list[int]:
    _check_texts(texts, first)
    if not texts:
        return []
    shorten = {} if max_length is None else {"truncation": True, "max_length": max_length}
    return [len(ids) for ids in tokenizer(list(texts), **shorten)["input_ids"]]


def _measure_texts(
    texts: Any, tokenizer: Callable[..., Any], max_length: int | None, num_proc: int | None, disable: bool | None
) -> ArrayLike:
    from tqdm.auto import tqdm

    if num_proc is not None and num_proc > 1:
        return _measure_in_processes(texts, tokenizer, max_length, num_proc)
    counts: list[int] = []
    with tqdm(total=len(texts), desc="measuring lengths", unit=" texts", disable=disable) as bar:
        for chunk in _chunks(texts, TEXTS_PER_CALL):
            counts += _token_counts(chunk, len(counts), tokenizer, max_length)
            bar.update(len(chunk))
    return counts


def _measure_in_processes(
    texts: Any, tokenizer: Callable[..., Any], max_length: int | None, num_proc: int
) -> NDArray[np.int32]:
    from datasets import Dataset

    texts = list(texts)
    _check_texts(texts, 0)
    return _map_counts(Dataset.from_dict({"text": texts}), "text", tokenizer, max_length, num_proc)


def _is_hf_dataset(data: Any) -> bool:
    datasets = sys.modules.get("datasets")  # whoever holds one has imported it
    return datasets is not None and isinstance(data, datasets.Dataset)


def _measure_hf(
    data: Any, tokenizer: Callable[..., Any] | None, column: str | None, max_length: int | None, num_proc: int | None
) -> NDArray[np.integer[Any]]:
    column = column or ("input_ids" if tokenizer is None else _text_column(data))
    if column not in data.column_names:
        raise ConfigError(f"`column` must be one of {data.column_names}, but is {column!r}")
    if tokenizer is not None:
        return _map_counts(data, column, tokenizer, max_length, num_proc)
    return _list_lengths(data, column)


def _text_column(data: Any) -> str:
    texts = [name for name, kind in data.features.items() if getattr(kind, "dtype", None) in ("string", "large_string")]
    if len(texts) != 1:
        raise ConfigError(f"the dataset has {len(texts)} text columns ({texts}): name one with `column`")
    return texts[0]


def _map_counts(
    data: Any, column: str, tokenizer: Callable[..., Any], max_length: int | None, num_proc: int | None
) -> NDArray[np.int32]:
    # A first call leaves its truncation setting in a fast tokenizer. Made here, it happens before `datasets` takes the
    # fingerprint of the function, so that the next call finds the cache.
    _token_counts(["a"], 0, tokenizer, max_length)
    counted = data.select_columns([column]).map(
        partial(_count_column, column=column, tokenizer=tokenizer, max_length=max_length),
        batched=True,
        batch_size=TEXTS_PER_CALL,
        with_indices=True,
        remove_columns=[column],
        num_proc=num_proc,
        desc="measuring lengths",
    )
    return np.asarray(counted.with_format("numpy")["length"][:]) if len(counted) else np.zeros(0, np.int32)


def _count_column(
    batch: Mapping[str, Sequence[Any]],
    indices: Sequence[int],
    *,
    column: str,
    tokenizer: Callable[..., Any],
    max_length: int | None,
) -> dict[str, NDArray[np.int32]]:
    counts = _token_counts(list(batch[column]), indices[0], tokenizer, max_length)
    return {"length": np.asarray(counts, np.int32)}


def _list_lengths(data: Any, column: str) -> NDArray[np.int64]:
    import pyarrow as pa
    import pyarrow.compute as pc

    counts = [np.zeros(0, np.int64)]
    for table in data.select_columns([column]).with_format("arrow").iter(batch_size=10 * TEXTS_PER_CALL):
        ids = table.column(0)
        if not (pa.types.is_list(ids.type) or pa.types.is_large_list(ids.type)):
            raise ConfigError(f"column {column!r} holds {ids.type}, not lists of ids; give a `tokenizer` for texts")
        if ids.null_count:
            index = sum(map(len, counts)) + int(np.argmax(ids.is_null().to_numpy()))
            raise ConfigError(f"sample {index} of column {column!r} is None; correct or filter out that sample")
        counts.append(np.asarray(pc.call_function("list_value_length", [ids]).to_numpy(), np.int64))
    return np.concatenate(counts)


def _measure_ids(data: Any, field: str, disable: bool | None) -> list[int]:
    from tqdm.auto import tqdm

    counts: list[int] = []
    for index, sample in enumerate(tqdm(data, desc="measuring lengths", unit=" samples", disable=disable)):
        ids = sample.get(field) if isinstance(sample, Mapping) else sample
        if isinstance(ids, str):
            raise ConfigError(f"sample {index} is a text ({ids[:40]!r}); give the `tokenizer` that training uses")
        if not isinstance(ids, Sized):
            raise ConfigError(
                f"sample {index} must be a sequence of ids or a mapping with {field!r}, but is {sample!r:.200}; "
                "name the field with `column`, or give `length_of`"
            )
        count = count_ids(ids)
        if count is None:
            shape = getattr(ids, "shape", None)
            found = f"{type(ids).__name__} of shape {tuple(shape)}" if shape is not None else f"{sample!r:.200}"
            raise ConfigError(
                f"sample {index} must be one row of ids, but is {found}; take its ids, or give `length_of`"
            )
        counts.append(count)
    return counts


def _measure_with(data: Any, length_of: Callable[[Any], Any], workers: int, disable: bool | None) -> Any:
    from torch.utils.data import DataLoader
    from tqdm.auto import tqdm

    # One worker process is only a detour; from two on the dataset is read in parallel, in order.
    loader = DataLoader(
        data,
        batch_size=64,
        num_workers=workers if workers > 1 else 0,
        collate_fn=partial(_apply, length_of),
    )
    found: list[Any] = []
    with tqdm(total=len(data), desc="measuring lengths", unit=" samples", disable=disable) as bar:
        for chunk in loader:
            found += chunk
            bar.update(len(chunk))
    if len(found) != len(data):
        raise ConfigError(
            f"{len(found)} of {len(data)} samples were measured: the dataset or `length_of` raised StopIteration behind them, or "
            "gives more samples than its len()"
        )
    if not found or not isinstance(found[0], Mapping):
        return np.asarray(found) if found else np.zeros(0, np.int32)
    for index, lengths in enumerate(found):
        if not isinstance(lengths, Mapping) or lengths.keys() != found[0].keys():
            raise ConfigError(f"length_of gave {sorted(found[0])} for sample 0, but {lengths!r} for sample {index}")
    return {name: np.asarray([lengths[name] for lengths in found]) for name in found[0]}


def _apply(function: Callable[[Any], Any], samples: Sequence[Any]) -> list[Any]:
    return [function(sample) for sample in samples]

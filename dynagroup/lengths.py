"""Lengths of samples: measured once, checked once, int32 from then on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import islice
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynagroup.errors import ConfigError
from dynagroup.shapes import TOKENS, Streams, TokensCalled, said
from dynagroup.tokenizer import LONGEST, check_text, is_chat, limit_of, refuse_chat
from dynagroup.validation import check_function, check_int

__all__ = ["as_streams", "count_ids", "measure_lengths", "with_tokens"]

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
    """
    named = with_tokens(lengths) if isinstance(lengths, Mapping) else {TOKENS: lengths}
    streams = {name: _as_int32(_as_array(values, said(name)), said(name)) for name, values in named.items()}
    num_samples = len(streams[TOKENS])
    for name, values in streams.items():
        if len(values) != num_samples:
            tokens = said(next(key for key in named if key == TOKENS))
            raise ConfigError(
                f"lengths[{name!r}] has {len(values)} samples, but lengths[{tokens!r}] has {num_samples}: sample "
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


def _as_array(values: ArrayLike, name: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
        found = f"an array of shape {array.shape}"
    except (RuntimeError, TypeError, ValueError) as error:  # ragged lists; tensors of a device, of bfloat16
        array, found = np.empty(()), str(error)
    if array.ndim != 1:
        raise ConfigError(
            f"lengths[{name!r}] must be one number a sample, but is {found}; "
            "measure_lengths() measures texts and token lists"
        )
    return array


def _as_int32(array: NDArray[Any], name: str) -> NDArray[np.int32]:
    legal = _are_lengths(array)
    if not legal.all():
        index = int(np.argmin(legal))
        raise ConfigError(
            f"lengths[{name!r}][{index}] must be a whole number from 0 to {LONGEST}, but is {array[index:].tolist()[0]!r}; "
            "correct or filter out that sample"
        )
    return array.astype(np.int32, copy=False)


def _are_lengths(array: NDArray[Any]) -> NDArray[np.bool_]:
    if array.dtype.kind in "iuf":
        numbers = array.astype(np.float64)  # in float16 and float32 the limit itself would be rounded up
        return (numbers >= 0) & (numbers <= LONGEST) & (np.floor(array) == array)
    if array.dtype.kind == "O":
        return np.fromiter(map(_is_length, array), np.bool_, len(array))
    return np.zeros(len(array), np.bool_)


def _is_length(value: Any) -> bool:
    number = value.item() if isinstance(value, (np.integer, np.floating)) else value
    whole = isinstance(number, (int, float)) and not isinstance(number, bool)
    return whole and 0 <= number <= LONGEST and number == int(number)


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
        ConfigError: a text is None, not a string or no UTF-8, a length is not a whole number (names the sample and its
            value), or arguments do not go together.

    >>> measure_lengths([[5, 6, 7], [], [8]]).tolist()
    [3, 0, 1]
    >>> measure_lengths(["a b", "c"], length_of=lambda text: len(text.split())).tolist()
    [2, 1]
    """
    _check_arguments(data, tokenizer, column, num_proc, length_of)
    data, column = _by_position(data, column)
    max_length = limit_of(max_length)
    disable = None if progress else True  # tqdm: None is silent where output is no terminal
    if length_of is not None:
        found = _measure_with(data, length_of, num_proc or 0, disable)
    elif _is_hf_dataset(data):
        found = _measure_hf(data, tokenizer, column, max_length, num_proc)
    elif tokenizer is not None:
        found = _measure_texts(data, tokenizer, column, max_length, num_proc, disable)
    else:
        found = _measure_ids(data, column or "input_ids", disable)
    streams = as_streams(found)
    if max_length is not None:  # a length of text; streams beside it count other things
        streams = {**streams, TOKENS: np.minimum(streams[TOKENS], np.int32(max_length))}
    return dict(streams) if isinstance(found, Mapping) else streams[TOKENS]


def _check_arguments(data: Any, tokenizer: Any, column: Any, num_proc: int | None, length_of: Any) -> None:
    if column is not None and not isinstance(column, str):
        raise ConfigError(f"`column` must be the name of a column, but is {column!r}")
    if num_proc is not None:
        check_int("num_proc", num_proc)
    if length_of is not None:
        check_function("length_of", length_of, "from a sample to its length")
        if tokenizer is not None:
            raise ConfigError("`tokenizer` and `length_of` both say how to measure; give one of them")
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
                f"`data` is a whole {type(data).__name__}: name its texts or ids with `column`, one of {names}, not {column!r}"
            )
        values = data[column]
        return (values.to_pylist() if hasattr(values, "to_pylist") else list(values)), None
    return (list(data) if hasattr(data, "iloc") else data), column


def _measure_texts(
    data: Any,
    tokenizer: Callable[..., Any],
    column: str | None,
    max_length: int | None,
    num_proc: int | None,
    disable: bool | None,
) -> ArrayLike:
    from tqdm.auto import tqdm

    texts = iter(data) if column is None else _field(data, column)
    if num_proc is not None and num_proc > 1:
        from datasets import Dataset

        checked = [check_text(text, index) for index, text in enumerate(texts)]
        return _map_counts(Dataset.from_dict({"text": checked}), "text", tokenizer, max_length, num_proc)
    counts: list[int] = []
    with tqdm(total=len(data), desc="measuring lengths", unit=" texts", disable=disable) as bar:
        while chunk := list(islice(texts, TEXTS_PER_CALL)):
            counts += _token_counts(chunk, len(counts), tokenizer, max_length)
            bar.update(len(chunk))
    return counts


def _field(data: Any, column: str) -> Iterator[Any]:
    for index, sample in enumerate(data):
        try:
            yield sample[column]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"sample {index} must be a mapping with {column!r}, but is {sample!r:.200}; name the field with `column`"
            ) from error


def _token_counts(texts: Sequence[Any], first: int, tokenizer: Callable[..., Any], max_length: int | None) -> list[int]:
    checked = [check_text(text, index) for index, text in enumerate(texts, first)]
    shorten = {} if max_length is None else {"truncation": True, "max_length": max_length}
    return [len(ids) for ids in tokenizer(checked, **shorten)["input_ids"]] if checked else []


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
        is_list = pa.types.is_list(ids.type) or pa.types.is_large_list(ids.type)
        if not is_list or pa.types.is_nested(ids.type.value_type) or pa.types.is_string(ids.type.value_type):
            raise ConfigError(
                f"column {column!r} holds {ids.type}, not lists of ids; give a `tokenizer` for texts; "
                "tokenizer.apply_chat_template(messages, tokenize=False) makes a text of a chat"
            )
        if ids.null_count:
            index = sum(map(len, counts)) + int(np.argmax(ids.is_null().to_numpy()))
            raise ConfigError(f"sample {index} of column {column!r} is None; correct or filter out that sample")
        counts.append(np.asarray(pc.call_function("list_value_length", [ids]).to_numpy(), np.int64))
    return np.concatenate(counts)


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


def _measure_ids(data: Any, field: str, disable: bool | None) -> list[int]:
    from tqdm.auto import tqdm

    rows = enumerate(tqdm(data, desc="measuring lengths", unit=" samples", disable=disable))
    return [
        _count_row(sample.get(field) if isinstance(sample, Mapping) else sample, sample, index, field)
        for index, sample in rows
    ]


def _count_row(ids: Any, sample: Any, index: int, field: str) -> int:
    if is_chat(ids):
        refuse_chat(ids, index)
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
        found = f"{sample!r:.200}" if shape is None else f"{type(ids).__name__} of shape {tuple(shape)}"
        raise ConfigError(f"sample {index} must be one row of ids, but is {found}; take its ids, or give `length_of`")
    return count


def _measure_with(data: Any, length_of: Callable[[Any], Any], workers: int, disable: bool | None) -> Any:
    from torch.utils.data import DataLoader
    from tqdm.auto import tqdm

    found: list[Any] = []
    workers = workers if workers > 1 else 0  # one worker process is only a detour
    with tqdm(total=len(data), desc="measuring lengths", unit=" samples", disable=disable) as bar:
        for chunk in DataLoader(data, batch_size=64, num_workers=workers, collate_fn=partial(_each, length_of)):
            found += chunk
            bar.update(len(chunk))
    if len(found) != len(data):
        raise ConfigError(
            f"{len(found)} of {len(data)} samples were measured: the dataset or `length_of` raised StopIteration behind them, or "
            "gives more samples than its len()"
        )
    return _by_stream(found) if found and isinstance(found[0], Mapping) else np.asarray(found or np.zeros(0, np.int32))


def _each(length_of: Callable[[Any], Any], samples: Sequence[Any]) -> list[Any]:
    return [length_of(sample) for sample in samples]


def _by_stream(found: Sequence[Any]) -> dict[str, NDArray[Any]]:
    for index, lengths in enumerate(found):
        if not isinstance(lengths, Mapping) or lengths.keys() != found[0].keys():
            raise ConfigError(f"length_of gave {sorted(found[0])} for sample 0, but {lengths!r} for sample {index}")
    return {name: np.asarray([lengths[name] for lengths in found]) for name in found[0]}

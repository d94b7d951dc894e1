"""Measures the lengths of samples: texts with a tokenizer, rows of token ids, or anything with a length function."""

import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
from dynagroup.lengths import as_streams, by_stream, limit_of
from dynagroup.shapes import TOKENS, primary
from dynagroup.validation import check_function, check_int, explained, fetch, sendable, warn_user

VALUES = "input_values"  # field of speech models: fractions
IDS = ("input_ids", VALUES)  # usual names of fields with one entry per position
MASK = "attention_mask"  # 1 for entries of these fields that count, 0 for padding
LENGTH_OF = "for other samples give `length_of`, e.g. lambda row: len(row['audio']['array'])"
CHATS = ("messages", "conversations")  # usual names of columns of chats
# Columns that together are one sample: two texts, or two lists of messages.
ANSWERED = ("prompt", "completion")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
CHAT = "turn a chat into a text with tokenizer.apply_chat_template(messages, tokenize=False)"
PADDED_ROWS = 0.01  # a larger share of padding in rows is told
TEXTS_PER_CALL = 1000  # as in datasets.map; a fast tokenizer works in parallel within one call
SAMPLES_PER_CALL = 64  # samples for `length_of` may be large, such as audio
Tokenizer: TypeAlias = Callable[..., Any]  # called like a transformers tokenizer


def measure_lengths(
    data: Any,
    tokenizer: Tokenizer | None = None,
    column: str | None = None,
    max_length: int | None = None,
    num_proc: int | None = None,
    *,
    length_of: Callable[[Any], Any] | None = None,
    progress: bool = True,
) -> Any:
    """Measures the tokens of every sample; returns int32 (N,) in dataset order, and shows a progress bar.

    Where samples have an ``attention_mask``, the tokens that it marks are counted, and a warning says how much of the
    rows is padding. Several choices of a sample (a list of rows) count as they are collated: their number times the
    longest. ``datasets`` caches the lengths of a ``datasets.Dataset``'s texts, as it caches transforms.

    Args:
        data: texts, pairs of texts or chats (lists of messages, by the tokenizer's template), all with a ``tokenizer``; a
            ``datasets.Dataset``; tokenized samples (sequences of token ids, or mappings that contain one); or any
            map-style dataset (with ``length_of``).
        tokenizer: called like a transformers tokenizer; special tokens are counted.
        column: name of the text or id field of a table, or of samples that are mappings. None: the only text column of
            a ``datasets.Dataset`` if a tokenizer is given, or its columns ``prompt`` and ``completion`` as one; else
            ``input_ids`` or ``input_values``.
        max_length: int, tokens: texts are truncated to this many, or counted as this many (in the primary stream).
        num_proc: int, number of processes. None: only this process.
        length_of: function from a sample (or its ``column``) to its length, or to a mapping from stream names to
            lengths, whose primary stream is ``tokens`` or the first. With mappings the result is a dict of arrays.
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
    check_function("length_of", length_of, "from a sample to its length")
    if num_proc is not None:
        check_int("num_proc", num_proc)
    max_length = limit_of(max_length)
    if _is_table(data) and column is not None:
        data = data[column]
        column = None
    if not is_hf_dataset(data):
        data = by_position(data, "data")

    if length_of is not None:
        lengths = _apply_to_rows(data, length_of, column, num_proc, progress)
    elif tokenizer is not None and is_hf_dataset(data):
        lengths = _map_texts(data, tokenizer, column, max_length, num_proc)
    elif tokenizer is not None:
        count = partial(_count_texts, tokenizer, column, max_length)
        lengths = _Chunks(data, count, TEXTS_PER_CALL).measured(num_proc, progress)
    else:
        lengths = _ids_of_rows(data, column, num_proc, progress)

    streams = as_streams(lengths)
    if max_length is not None:  # the limit is for text; other streams do not count tokens
        text = primary(streams)
        streams = {**streams, text: np.minimum(streams[text], np.int32(max_length))}
    return dict(streams) if isinstance(lengths, Mapping) else streams[TOKENS]


@dataclass(frozen=True)
class _Chunks:
    """Chunks of a map-style dataset, measured: the dataset of a ``DataLoader`` whose workers measure in parallel.

    ``measure`` gets the samples of a chunk and the index of the first; it returns one value per sample.
    """

    data: Any
    measure: Callable[[Sequence[Any], int], list[Any]]
    size: int

    def __len__(self) -> int:
        return -(-len(self.data) // self.size)

    def __getitem__(self, chunk: int) -> list[Any]:
        first = chunk * self.size
        indices = range(first, min(first + self.size, len(self.data)))
        return self.measure(fetch(self.data, indices), first)

    def measured(self, num_proc: int | None, progress: bool) -> list[Any]:
        from torch import Generator
        from torch.utils.data import DataLoader
        from tqdm.auto import tqdm

        loader = DataLoader(
            self,  # type: ignore[arg-type]
            batch_size=None,
            num_workers=0 if num_proc in (None, 1) else num_proc,
            collate_fn=list,
            generator=Generator(),  # else it would draw from the global one
        )
        values: list[Any] = []
        disable = None if progress else True  # None hides the bar where output is not a terminal
        with tqdm(total=len(self.data), desc="measuring lengths", disable=disable) as bar:
            for chunk in loader:
                values += chunk
                bar.update(len(chunk))
        return values


def _apply_to_rows(
    data: Any,
    length_of: Callable[[Any], Any],
    column: str | None,
    num_proc: int | None,
    progress: bool,
) -> Any:
    """Returns what ``length_of`` returns for each sample, as an array, or as a dict of arrays by stream."""
    if is_hf_dataset(data) and column is not None:
        _check_column(data, column)
        data = data.select_columns([column])
    chunks = _Chunks(data, partial(_apply, length_of, column), SAMPLES_PER_CALL)
    return by_stream(chunks.measured(num_proc, progress), range(len(data)))


@sendable(lambda: "length_of failed")
def _apply(
    length_of: Callable[[Any], Any], column: str | None, samples: Sequence[Any], first: int
) -> list[Any]:
    values = samples if column is None else [sample[column] for sample in samples]
    return [length_of(value) for value in values]


def _count_texts(
    tokenizer: Tokenizer,
    column: str | None,
    max_length: int | None,
    samples: Sequence[Any],
    first: int,
) -> list[int]:
    texts = samples if column is None else [sample[column] for sample in samples]
    if texts and all(map(is_chat, texts)):
        return _count_chats(tokenizer, max_length, texts)
    for index, text in enumerate(texts, first):
        if not isinstance(text, str) and not is_pair(text):
            raise ConfigError(
                f"text {index} must be a string, but is {text!r:.200}; "
                f"correct or filter out that sample; {CHAT}"
            )
    if not texts:  # some tokenizers refuse an empty list
        return []
    with explained(
        f"the tokenizer failed on one of the texts {first} to {first + len(texts) - 1}",
        way_out="; for lone surrogates, text.encode('utf-8', 'replace').decode() helps",
    ):
        return list(map(len, tokenized(tokenizer, texts, max_length)["input_ids"]))


def is_chat(item: object) -> bool:
    """Returns whether an item is a chat: a list of messages."""
    if not isinstance(item, (list, tuple)) or not item:
        return False
    return all(isinstance(message, Mapping) for message in item)


def _count_chats(
    tokenizer: Any, max_length: int | None, chats: Sequence[Sequence[Mapping[str, Any]]]
) -> list[int]:
    """Counts the tokens of chats as the tokenizer's template writes them."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "the samples are chats, and `tokenizer` has no chat template; set tokenizer.chat_template, "
            "or give texts"
        )
    texts = []
    for chat in chats:
        messages = list(map(_message, chat))
        texts.append(tokenizer.apply_chat_template(messages, tokenize=False))
    # A template writes the special tokens itself.
    tokens = tokenized(tokenizer, texts, max_length, add_special_tokens=False)
    return list(map(len, tokens["input_ids"]))


def _message(message: Mapping[str, Any]) -> Mapping[str, object]:
    """Returns a message with "role" and "content"; ShareGPT's have "from" and "value"."""
    if "from" not in message:
        return message
    role = SHAREGPT_ROLES.get(message["from"], message["from"])
    return {"role": role, "content": message["value"]}


def is_pair(item: object) -> bool:
    """Returns whether an item is a pair of texts, such as a query and a document."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return False
    return isinstance(item[0], str) and isinstance(item[1], str)


def tokenized(
    tokenizer: Tokenizer, texts: Sequence[Any], max_length: int | None, **options: Any
) -> Any:
    """Returns what the tokenizer returns for texts, or for pairs of texts, that are truncated to ``max_length`` tokens;
    None: no limit."""
    if max_length is not None:
        options.update(truncation=True, max_length=max_length)
    num_pairs = sum(map(is_pair, texts))
    if 0 < num_pairs < len(texts):
        raise ConfigError(f"{num_pairs} of {len(texts)} texts are pairs; give texts or pairs only")
    columns = zip(*texts, strict=True) if num_pairs else [texts]
    return tokenizer(*map(list, columns), **options)


def _map_texts(
    data: Any,
    tokenizer: Tokenizer,
    column: str | None,
    max_length: int | None,
    num_proc: int | None,
) -> Any:
    """Tokenizes a column of a ``datasets.Dataset`` by ``map``, which caches the lengths."""
    if column is None:
        data = with_answers(data)
        column = _only_text_column(data)
    _check_column(data, column)

    def count(texts: Sequence[object], indices: Sequence[int]) -> dict[str, list[int]]:
        return {"length": _count_texts(tokenizer, None, max_length, texts, indices[0])}

    # A fast tokenizer's first call changes it: call it before `datasets` takes the fingerprint by which it finds caches.
    _count_texts(tokenizer, None, max_length, ["a"], 0)
    lengths = data.select_columns([column]).map(
        count,
        batched=True,
        with_indices=True,
        input_columns=[column],
        remove_columns=[column],
        num_proc=num_proc,
        desc="measuring lengths",
    )
    return lengths.with_format("numpy")["length"][:] if len(lengths) else []


def with_answers(data: Any) -> Any:
    """Returns a dataset of the columns prompt and completion with one column, of both; any other dataset as it is."""
    names = data.column_names
    if not set(ANSWERED) <= set(names) or not {"text", *CHATS}.isdisjoint(names):
        return data

    def joined(prompt: Any, completion: Any) -> dict[str, Any]:
        return {"text": prompt + completion}

    return data.map(joined, input_columns=list(ANSWERED), remove_columns=names)


def _only_text_column(data: Any) -> str:
    if len(data.column_names) == 1:
        return data.column_names[0]
    texts = []
    for name, kind in data.features.items():
        if getattr(kind, "dtype", None) in ("string", "large_string"):
            texts.append(name)
    if not texts:
        texts = [name for name in CHATS if name in data.features]
    if len(texts) != 1:
        raise ConfigError(
            f"the dataset has {len(texts)} text columns ({texts}); name one with `column`"
        )
    return texts[0]


def _check_column(data: Any, column: str) -> None:
    if column not in data.column_names:
        raise ConfigError(
            f"`column` must be one of {data.column_names}, but is {column!r}; {LENGTH_OF}"
        )


def _ids_of_rows(data: Any, column: str | None, num_proc: int | None, progress: bool) -> Any:
    """Counts the ids of each row, with an attention mask those that it marks; warns of padding."""
    if is_hf_dataset(data):
        if column is None:
            column = _id_field(data.column_names)
        _check_column(data, column)
        rows = row_lengths(data, column)
        marked = _marked_lengths(data, rows) if column in IDS else rows
    else:
        if column is None and len(data) > 0 and isinstance(data[0], Mapping):
            column = _id_field(data[0])
        chunks = _Chunks(data, partial(_count_rows, column), TEXTS_PER_CALL)
        counts = np.array(chunks.measured(num_proc, progress), np.int64).reshape(-1, 2)
        rows, marked = counts.T

    num_ids = max(np.nansum(rows), 1)
    padding = 1 - np.nansum(marked) / num_ids
    if len(rows) and padding > PADDED_ROWS:
        warn_user(
            f"your rows are padded in advance: {padding:.0%} of {column!r} is padding, by {MASK!r}; tokenize "
            "without padding, and leave padding to the collate function, which pads to the longest of a batch"
        )
    return marked


def _id_field(names: Container[str]) -> str:
    for name in IDS:
        if name in names:
            return name
    return IDS[0]


def row_lengths(data: Any, column: str) -> NDArray[Any]:
    """Returns the ids of each row of a ``datasets.Dataset``, padding included: (N,); nan where a row is None.

    ConfigError: the rows are no lists of numbers.
    """
    import pyarrow.compute as pc

    if len(data) > 0 and count_choices(data[0][column]) is not None:
        choices = (count_choices(row[column]) for row in data.select_columns([column]))
        return np.fromiter(choices, np.int64, count=len(data))
    if len(data) > 0 and count_ids(data[0][column], values=column == VALUES) is None:
        raise ConfigError(
            f"column {column!r} must contain lists of token ids, but contains {data[0][column]!r:.200}; "
            f"give a `tokenizer` for texts; {CHAT}; {LENGTH_OF}"
        )
    lengths = [np.zeros(0, np.int64)]
    for rows in _arrow_chunks(data, column):
        lengths.append(pc.call_function("list_value_length", [rows]).to_numpy(zero_copy_only=False))
    return np.concatenate(lengths)


def _marked_lengths(data: Any, rows: NDArray[Any]) -> NDArray[Any]:
    """Returns the entries of each row that the attention mask marks; without a mask of plain rows, all."""
    import pyarrow.compute as pc

    if MASK not in data.column_names or not len(data) or count_ids(data[0][MASK]) is None:
        return rows
    marked = []
    for masks in _arrow_chunks(data, MASK):
        entries = pc.call_function("list_flatten", [masks]).to_numpy(zero_copy_only=False)
        row_of_entry = pc.call_function("list_parent_indices", [masks]).to_numpy()
        marked.append(np.bincount(row_of_entry, weights=entries, minlength=len(masks)))
    return np.concatenate(marked)


def _arrow_chunks(data: Any, column: str) -> Iterator[Any]:
    table = data.select_columns([column]).with_format("arrow")
    for chunk in table.iter(batch_size=10_000):
        yield chunk.column(0).combine_chunks()


def _count_rows(column: str | None, samples: Sequence[object], first: int) -> list[tuple[int, int]]:
    """Counts the ids of each row, and those that the row's attention mask marks."""
    return [_count_row(column, sample, index) for index, sample in enumerate(samples, first)]


def _count_row(column: str | None, sample: object, index: int) -> tuple[int, int]:
    row = sample
    mask = None
    if column is not None:
        if not isinstance(sample, Mapping) or column not in sample:
            fields = sorted(sample) if isinstance(sample, Mapping) else type(sample).__name__
            raise ConfigError(
                f"sample {index} has no {column!r} (it has {fields}); name its `column`; {LENGTH_OF}"
            )
        row = sample[column]
        if column in IDS:
            mask = sample.get(MASK)
    num_ids = count_ids(row, values=column == VALUES)
    if num_ids is None and column is not None:
        num_ids = count_choices(row)
        mask = None
    if num_ids is None:
        raise ConfigError(
            f"sample {index} must be one row of token ids (1-D, whole numbers), but is {row!r:.200}; name its "
            "`column`, give the `tokenizer` for texts, or give `length_of`, for several choices a sample: number of "
            f"choices * longest; {CHAT}"
        )
    return num_ids, num_ids if mask is None else int(np.sum(np.asarray(mask)))


def count_ids(row: Any, *, values: bool = False) -> int | None:
    """Returns the length of a row of token ids: a list, or an array or tensor of one dimension; None for other data.

    With ``values`` the entries may be fractions, as those of sound are.

    >>> count_ids([5, 6, 7]), count_ids(([5, 6, 7], 1)), count_ids(np.zeros((1, 7), int))
    (3, None, None)
    >>> count_ids([0.5, 0.25]), count_ids([0.5, 0.25], values=True)
    (None, 2)
    """
    is_mapping = hasattr(row, "keys")
    if is_mapping or isinstance(row, (str, bytes, tuple)) or not hasattr(row, "__getitem__"):
        return None
    if len(row) == 0:
        return 0
    start = np.asarray(row[:1])
    kinds = "biuf" if values else "biu"
    is_row = start.ndim == 1 and start.dtype.kind in kinds
    return len(row) if is_row else None


def count_choices(rows: object) -> int | None:
    """Returns the number of choices times the longest, for at least two rows of token ids; None for other data.

    >>> count_choices([[5, 6], [7]]), count_choices([[5, 6]]), count_choices([5, 6])
    (4, None, None)
    """
    if not isinstance(rows, list) or len(rows) < 2:  # one row in a list is a batch of one
        return None
    longest = 0
    for row in rows:
        num_ids = count_ids(row)
        if num_ids is None:
            return None
        longest = max(longest, num_ids)
    return len(rows) * longest


def by_position(values: Any, name: str = "texts") -> Sequence[Any]:
    """Returns ``values`` as a sequence that is indexed by position (a pandas Series is indexed by its labels)."""
    if not _is_sequence(values):
        raise ConfigError(
            f"`{name}` must be a list or one column, but is a whole {type(values).__name__}; "
            "for a stream use OnlineDataLoader"
        )
    if hasattr(values, "to_pylist"):  # a pyarrow column
        return values.to_pylist()
    if hasattr(values, "iloc") or not hasattr(values, "__getitem__"):
        return list(values)
    return values


def _is_sequence(values: object) -> bool:
    if isinstance(values, (str, bytes, Mapping)) or _is_table(values) or is_hf_dataset(values):
        return False
    return hasattr(values, "__len__")


def _is_table(data: object) -> bool:
    return hasattr(data, "columns") and hasattr(data, "shape")  # of pandas, polars or pyarrow


def is_hf_dataset(data: object) -> bool:
    datasets = sys.modules.get("datasets")  # whoever has a Dataset has imported datasets
    return datasets is not None and isinstance(data, datasets.Dataset)

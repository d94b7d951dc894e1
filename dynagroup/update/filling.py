"""Pads collated batches to one of a few shapes, with padding tokens and with rows of weight 0."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils.data import default_collate

from dynagroup.errors import ConfigError
from dynagroup.shapes import BatchShape
from dynagroup.update.loss_weight import IGNORED
from dynagroup.update.step import total_of, width_of

Shape: TypeAlias = tuple[int, int]  # rows, width; of packed batches: samples, tokens
Collate: TypeAlias = Callable[[list[Any]], Any]
PadFunction: TypeAlias = Callable[[Any, int, Any], Any]
Pad: TypeAlias = Mapping[str, float | None] | PadFunction

LABELS = {"label", "labels", "shift_labels"}
MASKS = (
    "attention_mask",
    "decoder_attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "position_ids",
    "completion_mask",
)
PADDING = {**dict.fromkeys(LABELS, IGNORED), **dict.fromkeys(MASKS, 0), "special_tokens_mask": 1}
WAY_OUT = (
    "give `pad`: padding values by field, or a function (batch, number of samples, ladder) -> batch"
)


@dataclass
class FillingCollator:
    """A collate function that pads each batch to one of a few shapes. Added rows repeat a batch's first sample, with all
    labels -100, after the batch's own rows. Losses and weights that ignore labels of -100 do not count the added rows.
    ConfigError: a field cannot be padded.

    Args:
        collate_fn: function from samples to a mapping of tensors; None: ``default_collate``.
        ladder: a :class:`~dynagroup.ShapeLadder` with the shapes; None: batches are not padded.
        pad: dict from field to padding value (None: the field has no tokens), for fields that transformers does not
            have; or a function ``(batch, number of samples, ladder) -> batch``. Ids get the tokenizer's padding id."""

    collate_fn: Collate | None
    ladder: Any
    pad: Pad | None = None

    def __call__(self, samples: list[Any], shape: Shape | None = None) -> Any:
        return self.fill(self.collated(samples), len(samples), shape)

    def collated(self, samples: list[Any]) -> Any:
        """Returns the batch that ``collate_fn`` makes, before it is padded."""
        collate = self.collate_fn or default_collate
        return collate(samples)

    def fill(self, batch: Any, num_samples: int, shape: Shape | None = None) -> Any:
        """Pads a collated batch of ``num_samples`` samples to ``shape``, or to the cheapest that is large enough."""
        if self.ladder is None:
            return batch
        if callable(self.pad):
            return self.pad(batch, num_samples, self.ladder)
        if not hasattr(batch, "keys"):
            raise ConfigError(
                f"only a mapping can be padded to few shapes, not a {type(batch).__name__}; {WAY_OUT}"
            )
        if self.ladder.layout == "packed":
            return self._with_tail(batch, num_samples, shape)
        return self._with_rows(batch, num_samples, shape)

    def _with_rows(self, batch: Any, num_samples: int, shape: Shape | None) -> Any:
        """Adds padding columns and rows of weight 0 to a padded batch."""
        width = self._width(batch, num_samples)
        collated = BatchShape.of(num_samples, {self.ladder.stream: width})
        if num_samples > 1 and not self.ladder.holds(collated).any():
            raise ConfigError(
                f"a batch of {num_samples} samples has {width} tokens after collating, "
                f"more than any of the shapes {self.ladder.shapes}; give `lengths` in "
                "dataset order, and pad no further than the budget's `pad_to_multiple_of`"
            )
        if shape is None:
            run = self.ladder.as_run(collated)
            shape = (int(run.num_samples[0]), int(run.longest[self.ladder.stream][0]))
        num_rows, new_width = shape
        padding = self._padding()
        filled = copy.copy(batch)
        for key in batch:
            value = batch[key]
            if _has_rows(key, value, num_samples):
                value = _widened(key, value, width, new_width, padding)
            filled[key] = _with_added_rows(key, value, num_samples, num_rows)
        return filled

    def _width(self, batch: object, num_samples: int) -> int:
        stream = self.ladder.stream
        width = width_of(batch, num_samples, stream, [stream])
        if width is None:
            raise ConfigError(
                f"cannot find the length of {stream!r} in any field of the batch; {WAY_OUT}"
            )
        return width

    def _with_tail(self, batch: Any, num_samples: int, shape: Shape | None) -> Any:
        """Fills a packed batch up to the shape's tokens and samples: first with samples of weight 0, none longer than
        the dataset's longest, then with samples without tokens."""
        ladder = self.ladder
        stream = ladder.stream
        num_tokens = total_of(batch, stream, [stream])
        if num_tokens is None:
            raise ConfigError(
                f"cannot find the packed {stream!r} of the samples in any field of the batch; {WAY_OUT}"
            )
        if num_samples == 1 and num_tokens > ladder.shapes[-1][1]:
            return batch  # one sample that is larger than all shapes; its length was not known when they were chosen
        num_rows, total = shape or ladder.shape_for(num_samples, num_tokens)
        tail = _PackedTail(
            num_tokens=num_tokens,
            total=total,
            num_rows=num_rows,
            longest=ladder.longest,
            padding=self._padding(),
        )
        filled = copy.copy(batch)
        for key in batch:
            filled[key] = tail.added_to(key, batch[key])
        return filled

    def _padding(self) -> dict[str, Any]:
        """The padding value of each field; for token ids, that of the collate function or its tokenizer."""
        padding_id = getattr(self.collate_fn, "pad_token_id", None)
        if padding_id is None:
            tokenizer = getattr(self.collate_fn, "tokenizer", None)
            padding_id = getattr(tokenizer, "pad_token_id", None)
        if padding_id is None:
            padding_id = 0
        padding = {**PADDING, "input_ids": padding_id, "decoder_input_ids": padding_id}
        if isinstance(self.pad, Mapping):
            padding.update(self.pad)
        return padding


def _has_rows(key: str, value: object, num_samples: int) -> bool:
    """Returns whether a field is a tensor with one row a sample. ConfigError: it has other rows, or its labels are no
    classes, so that no row can have weight 0."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return False
    if len(value) != num_samples or (key in LABELS and value.is_floating_point()):
        raise ConfigError(
            "cannot add rows of weight 0 to the field "
            f"{key!r} {tuple(value.shape)} of {num_samples} samples; {WAY_OUT}"
        )
    return True


def _widened(
    key: str, value: torch.Tensor, width: int, new_width: int, padding: Mapping[str, Any]
) -> torch.Tensor:
    """Returns a field with padding columns, if it has one column per token."""
    has_columns = value.ndim > 1 and value.shape[1] == width
    if not has_columns or padding.get(key, 0) is None:
        return value
    if key not in padding:
        raise ConfigError(
            f"field {key!r} is as wide as the tokens, but has no padding value; {WAY_OUT}"
        )
    further_dimensions = [0, 0] * (value.ndim - 2)
    columns = [*further_dimensions, 0, new_width - width]
    return torch.nn.functional.pad(value, columns, value=padding[key])


def _with_added_rows(key: str, value: object, num_samples: int, num_rows: int) -> object:
    """Returns a field with copies of its first row, in which all labels are -100."""
    num_added = num_rows - num_samples
    if isinstance(value, (list, tuple)) and len(value) == num_samples:
        return type(value)([*value, *[value[0]] * num_added])
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    added = value[:1].expand(num_added, *value.shape[1:])
    if key in LABELS:
        added = torch.full_like(added, IGNORED)
    return torch.cat([value, added])


@dataclass(frozen=True, kw_only=True, slots=True)
class _PackedTail:
    """What stands behind the samples of a packed batch."""

    num_tokens: int  # of the samples
    total: int  # tokens with the tail
    num_rows: int  # samples with those of the tail
    longest: int  # most tokens of a sample of the tail
    padding: Mapping[str, Any]

    def added_to(self, key: str, value: Any) -> Any:
        """Returns a field with its tail, if it has one entry per token or sample."""
        if self.padding.get(key, 0) is None:
            return value
        if key.startswith("max_length"):
            return max(int(value), self.longest)
        if key.startswith("cu_seq_lens"):
            starts = range(self.num_tokens + self.longest, self.total, self.longest)
            borders = [*value.tolist(), *starts, self.total]
            num_empty = self.num_rows + 1 - len(borders)
            return value.new_tensor(borders + [self.total] * num_empty)
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        if value.shape[-1] != self.num_tokens:
            return value
        tail = self._tokens(key, value).to(value.dtype).expand(*value.shape[:-1], -1)
        return torch.cat([value, tail], dim=-1)

    def _tokens(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """Returns padding values; positions and numbers of samples are counted on."""
        places = torch.arange(self.total - self.num_tokens)
        if key == "position_ids":
            return value.flatten()[:1].sum() + places % self.longest
        if key == "seq_idx":
            next_sample = (value.flatten()[-1:] + 1).sum()
            return next_sample + places // self.longest
        if key not in self.padding:
            raise ConfigError(
                f"field {key!r} is as long as the tokens, but has no padding value; {WAY_OUT}"
            )
        return torch.full_like(places, self.padding[key])

"""Pads collated batches to one of a few shapes, with padding tokens and with rows of weight 0."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils.data import default_collate

from dynagroup.errors import ConfigError
from dynagroup.shapes import BatchShape, primary
from dynagroup.update.loss_weight import IGNORED
from dynagroup.update.step import SHOWN_IN, total_of, width_of

Shape: TypeAlias = tuple[int, ...]
Pad: TypeAlias = Mapping[str, float | None] | Callable[[Any, int, Any], Any]

LABELS = {"label", "labels", "shift_labels"}
MASKS = "attention_mask decoder_attention_mask token_type_ids mm_token_type_ids position_ids completion_mask".split()
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

    collate_fn: Callable[[list[Any]], Any] | None
    ladder: Any
    pad: Pad | None = None

    def __call__(self, samples: list[Any], shape: Shape | None = None) -> Any:
        return self.fill((self.collate_fn or default_collate)(samples), len(samples), shape)

    def fill(self, batch: Any, num_samples: int, shape: Shape | None = None) -> Any:
        """Pads a collated batch of ``num_samples`` samples to ``shape``, or to the cheapest that is large enough."""
        ladder = self.ladder
        if ladder is None:
            return batch
        if callable(self.pad):
            return self.pad(batch, num_samples, ladder)
        if not hasattr(batch, "keys"):
            raise ConfigError(
                f"only a mapping can be padded to few shapes, not a {type(batch).__name__}; {WAY_OUT}"
            )
        if ladder.layout == "packed":
            return self._with_tail(batch, num_samples, shape)
        now = {name: width_of(batch, num_samples, name, ladder.streams) for name in ladder.streams}
        missing = [name for name, width in now.items() if width is None]
        if missing:
            raise ConfigError(
                f"cannot find the length of {missing[0]!r} in any field of the batch; {WAY_OUT}"
            )
        asked = BatchShape.of(num_samples, now)  # type: ignore[arg-type]
        if num_samples > 1 and not ladder.holds(asked).any():
            came_out = (
                f"a batch of {num_samples} samples has {[*now.values()]} tokens after collating"
            )
            way_out = "give `lengths` in dataset order, and pad no further than the budget's `pad_to_multiple_of`"
            raise ConfigError(f"{came_out}, more than any of the shapes {ladder.shapes}; {way_out}")
        run = ladder.as_run(asked)
        rows, *wide = shape or (
            int(run.num_samples[0]),
            *(int(run.longest[name][0]) for name in now),
        )
        to, made, pad = dict(zip(now, wide, strict=True)), copy.copy(batch), self._pad()
        for key in batch:
            stream = _stream_of(key, ladder.streams)
            made[key] = _grown(key, batch[key], num_samples, rows, (now[stream], to[stream]), pad)
        return made

    def _with_tail(self, batch: Any, num_samples: int, shape: Shape | None) -> Any:
        """Fills a packed batch up to the shape's tokens and samples: first with samples of weight 0, none longer than
        the dataset's longest, then with samples without tokens."""
        [stream], longest, pad, made = (
            self.ladder.streams,
            self.ladder.longest,
            self._pad(),
            copy.copy(batch),
        )
        now = total_of(batch, stream, self.ladder.streams)
        if now is None:
            raise ConfigError(
                f"cannot find the packed {stream!r} of the samples in any field of the batch; {WAY_OUT}"
            )
        if num_samples == 1 and now > self.ladder.shapes[-1][1]:
            return batch  # one sample that is larger than all shapes; its length was not known when they were chosen
        samples, total = shape or self.ladder.shape_for(num_samples, now)
        tail = torch.arange(total - now)
        for key, value in ((key, batch[key]) for key in batch if pad.get(key, 0) is not None):
            if key.startswith("max_length"):
                made[key] = max(int(value), longest)
            elif key.startswith("cu_seq_lens"):
                borders = [*value.tolist(), *range(now + longest, total, longest), total]
                made[key] = value.new_tensor(borders + [total] * (samples + 1 - len(borders)))
            elif isinstance(value, torch.Tensor) and value.ndim and value.shape[-1] == now:
                start = (
                    value.flatten()[:1] if key == "position_ids" else value.flatten()[-1:] + 1
                ).sum()
                counted = {
                    "position_ids": start + tail % longest,
                    "seq_idx": start + tail // longest,
                }
                if key not in counted and key not in pad:
                    raise ConfigError(
                        f"field {key!r} is as long as the tokens, but has no padding value; {WAY_OUT}"
                    )
                more = counted.get(key, torch.full_like(tail, pad.get(key, 0)))
                made[key] = torch.cat(
                    [value, more.to(value.dtype).expand(*value.shape[:-1], -1)], dim=-1
                )
        return made

    def _pad(self) -> dict[str, Any]:
        """The padding value of each field; for token ids, that of the collate function or its tokenizer."""
        parts = self.collate_fn, getattr(self.collate_fn, "tokenizer", None)
        told = (getattr(part, "pad_token_id", None) for part in parts)
        ids = next((number for number in told if number is not None), 0)
        own: Any = self.pad or {}
        return {**PADDING, "input_ids": ids, "decoder_input_ids": ids, **own}


def _stream_of(key: str, streams: tuple[str, ...]) -> str:
    first, of_decoder = primary(streams), key in LABELS or key.startswith("decoder_")
    decoder = (
        name
        for name in streams
        if name == "target" or name in LABELS or name.startswith("decoder_")
    )
    named = (name for name in streams if key in (name, SHOWN_IN.get(name)) and name != first)
    return next(named, next(decoder, first) if of_decoder else first)


def _grown(
    key: str,
    value: Any,
    num_samples: int,
    rows: int,
    widths: tuple[Any, int],
    pad: Mapping[str, Any],
) -> Any:
    """Returns a field of the batch with added rows, and with padding columns if it has one column per token."""
    if isinstance(value, (list, tuple)) and len(value) == num_samples:
        return type(value)([*value, *[value[0]] * (rows - num_samples)])
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    if len(value) != num_samples or (key in LABELS and value.is_floating_point()):
        of = f"{key!r} {tuple(value.shape)} of {num_samples} samples"
        raise ConfigError(f"cannot add rows of weight 0 to the field {of}; {WAY_OUT}")
    if value.ndim > 1 and value.shape[1] == widths[0] and pad.get(key, 0) is not None:
        if key not in pad:
            raise ConfigError(
                f"field {key!r} is as wide as the tokens, but has no padding value; {WAY_OUT}"
            )
        value = torch.nn.functional.pad(
            value, [0, 0] * (value.ndim - 2) + [0, widths[1] - widths[0]], value=pad[key]
        )
    more = value[:1].expand(rows - num_samples, *value.shape[1:])
    return torch.cat([value, torch.full_like(more, IGNORED) if key in LABELS else more])

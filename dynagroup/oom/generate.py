"""``model.generate`` that goes on in parts when memory runs out, with the output it would have had."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from dynagroup.budget.learning import LearningBudget
from dynagroup.device import watch_of
from dynagroup.errors import ConfigError
from dynagroup.oom.fields import VisionTokens, first_dim, is_cache, longest_of, take_cache
from dynagroup.oom.retry import Parts
from dynagroup.oom.split import BatchSplitter
from dynagroup.shapes import BatchShape
from dynagroup.validation import check_int

if TYPE_CHECKING:
    import torch

__all__ = ["Generated", "check_options", "generate_with_oom_retry", "generation_option"]

# Options whose effect depends on padding tokens in the prompt (they look at token ids, or count positions from the left):
# with one of them a part keeps its batch's width, so that it generates what the whole would have.
_SEES_PADDING = {
    "repetition_penalty": (None, 1.0), "no_repeat_ngram_size": (None, 0), "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0), "bad_words_ids": (None,), "sequence_bias": (None,), "guidance_scale": (None, 1.0),
    "min_length": (None, 0), "penalty_alpha": (None,), "prompt_lookup_num_tokens": (None,), "watermarking_config": (None,),
    "dola_layers": (None,), "stop_strings": (None,), "forced_eos_token_id": (None,), "exponential_decay_length_penalty": (None,),
    "begin_suppress_tokens": (None,),
}  # fmt: skip
_CALLABLES = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "custom_generate", "assistant_model")
_REFUSED = {
    "streamer": "tokens of a failed attempt cannot be taken back from a stream",
    "synced_gpus": "ranks that generate in step cannot repeat a part alone",
    "output_attentions": "attentions of parts of different widths cannot be put together",
    "output_hidden_states": "hidden states of parts of different widths cannot be put together",
}
_COUNTER = BatchSplitter()
_learned_by_model: WeakKeyDictionary[Any, LearningBudget] = WeakKeyDictionary()


class Generated(NamedTuple):
    """What ``generate`` gives for the whole batch, and how often the batch was split for it.

    >>> output, num_splits = Generated(output=[1, 2], num_splits=0)
    """

    output: Any
    num_splits: int

    @property
    def sequences(self) -> torch.Tensor:
        """The token ids, with or without ``return_dict_in_generate``."""
        return getattr(self.output, "sequences", self.output)


def generate_with_oom_retry(
    model: Any,
    batch: Any,
    *,
    min_samples: int = 1,
    pad_token_id: int | None = None,
    learned: LearningBudget | None = None,
    indices: Sequence[int] = (),
    **generate_kwargs: Any,
) -> Generated:
    """``model.generate(**batch, **generate_kwargs)``, in parts where the whole does not fit.

    The output is the unsplit one's: samples in input order, padded alike, prompts with their padding. Greedy and beam
    search give the same tokens (up to what another batch size changes in the last bits of half-precision logits);
    sampling draws other random numbers after a split. With ``return_dict_in_generate``: where a part ended early, its
    missing scores give all probability to the padding token; ``past_key_values`` is None after a split.

    It learns: what has run out of memory for a model is split beforehand from then on.

    Args:
        batch: what the tokenizer or processor returned, or input ids (samples, tokens).
        min_samples: a part of fewer than twice as many samples is not cut any more.
        pad_token_id: fills finished samples; default: the model's, else its first end-of-sequence token.
        learned: what to learn into; default: one for each model, kept as long as the model.
        indices: dataset indices of the samples, to name them in messages.

    Raises:
        BudgetError: a part that cannot be cut further does not fit; names the samples and their shapes.
        ConfigError: options that cannot be honoured in parts: a streamer, ``synced_gpus``, attentions, hidden states.

    >>> output, num_splits = generate_with_oom_retry(model, batch, max_new_tokens=64)  # doctest: +SKIP
    """
    check_int("min_samples", min_samples)
    job = _Job(model, batch, pad_token_id, generate_kwargs)
    if learned is None:
        learned = _learned_by_model.get(model)
        if learned is None:
            learned = _learned_by_model[model] = LearningBudget()
    watch = watch_of(model)
    parts = Parts(
        run=job.generate,
        part=job.part,
        shape=job.shape,
        learned=learned,
        min_samples=min_samples,
        indices=indices,
        measured=watch.new_peak if watch is not None else lambda: (None, None),
        doing="generating for",
    ).run_all([(0, job.num_samples)])
    if len(parts) == 1:
        return Generated(parts[0][2], 0)
    return Generated(_merged(parts, job.layout), len(parts) - 1)


class _Job:
    """One batch to generate for: how it splits, what each part is given, and how the parts' outputs fit together."""

    def __init__(self, model: Any, batch: Any, pad_token_id: int | None, kwargs: dict[str, Any]) -> None:
        check_options(model, kwargs)
        self.model = model
        self.batch: dict[str, Any] = {**batch} if isinstance(batch, Mapping) else {"input_ids": batch}
        self.batch |= {name: value for name, value in kwargs.items() if _is_data(value)}
        self.kwargs = {name: value for name, value in kwargs.items() if not _is_data(value)}
        if pad_token_id is not None:
            self.kwargs["pad_token_id"] = pad_token_id

    @cached_property
    def is_causal(self) -> bool:
        return not self.model.config.is_encoder_decoder

    @cached_property
    def splitter(self) -> BatchSplitter:
        return BatchSplitter(trim=self._trim(), vision=VisionTokens.from_config(self.model.config))

    @cached_property
    def num_samples(self) -> int:
        return _COUNTER.num_samples(self.batch)

    def part(self, start: int, stop: int) -> dict[str, Any]:
        if stop - start < self.num_samples:
            return self.splitter.take(self.batch, start, stop)
        # An attempt extends the cache it is given: it gets a copy, so that the next finds the cache as it was.
        return {k: take_cache(v, start, stop) if is_cache(v) and first_dim(v) else v for k, v in self.batch.items()}

    def generate(self, start: int, stop: int) -> Any:
        kwargs = self.kwargs
        allowed = kwargs.get("prefix_allowed_tokens_fn")
        if start and allowed is not None:  # it is asked by position in the batch
            kwargs = {**kwargs, "prefix_allowed_tokens_fn": lambda sample, ids: allowed(sample + start, ids)}
        return self.model.generate(**self.part(start, stop), **kwargs)

    def shape(self, start: int, stop: int) -> BatchShape:
        """What memory grows with: every beam and returned sequence, at its full length in the end."""
        first, last = self.splitter.columns(self.batch, start, stop)
        copies = max(self._option("num_beams") or 1, self._option("num_return_sequences") or 1)
        return BatchShape.of((stop - start) * copies, last - first + self._max_new_tokens())

    @property
    def layout(self) -> _Layout:
        prompt = self.batch.get("input_ids") if self.is_causal else None
        return _Layout(
            prompt=prompt,
            columns=lambda start, stop: self.splitter.columns(self.batch, start, stop),
            num_return_sequences=self._option("num_return_sequences") or 1,
            num_beams=self._option("num_beams") or 1,
            pad_token_id=self._pad_token_id(),
        )

    def _trim(self) -> Any:
        """On which sides padding may be cut off without any effect on what is generated."""
        depends = any(self._option(name) not in neutral for name, neutral in _SEES_PADDING.items())
        if depends or any(self.kwargs.get(name) for name in _CALLABLES) or "decoder_input_ids" in self.batch:
            return "none"
        if self.is_causal:  # `max_length` counts the prompt's padding; `max_new_tokens` does not
            return "none" if self._option("max_new_tokens") is None else "left"
        return "right"

    def _option(self, name: str) -> Any:
        return generation_option(name, self.model, self.kwargs)

    def _max_new_tokens(self) -> int:
        new, total = self._option("max_new_tokens"), self._option("max_length")
        if new is not None or total is None:
            return new if new is not None else 20  # transformers' default
        return max(total - longest_of(self.batch), 0) if self.is_causal else total

    def _pad_token_id(self) -> int | None:
        pad, eos = self._option("pad_token_id"), self._option("eos_token_id")
        first_eos = eos[0] if isinstance(eos, (list, tuple)) else eos
        if pad is None or (pad == 0 and (self._option("num_beams") or 1) > 1 and first_eos is not None):
            pad = (
                first_eos  # transformers' beam search takes a padding token 0 for none: `pad_token_id or eos_token_id`
            )
        return None if pad is None else int(pad)


def check_options(model: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse what cannot be honoured in parts, also where the model's own generation config asks for it."""
    for name, why in _REFUSED.items():
        if generation_option(name, model, kwargs):
            raise ConfigError(f"`{name}` cannot be used with out-of-memory retry: {why}; call model.generate for it")


def generation_option(name: str, model: Any, kwargs: Mapping[str, Any]) -> Any:
    """What ``generate`` takes an option to be: its argument, its ``generation_config``, the model's; None if unsaid."""
    for source in (kwargs, kwargs.get("generation_config"), getattr(model, "generation_config", None)):
        value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
        if value is not None:
            return value
    return None


def _is_data(value: Any) -> bool:
    """Whether a keyword of ``generate`` has an entry per sample, and belongs to the batch."""
    return (
        is_cache(value) or (hasattr(value, "untyped_storage") and value.ndim > 0) or hasattr(value, "last_hidden_state")
    )


_OutputPart: TypeAlias = "tuple[int, int, Any]"
"""(first sample, the one behind the last, output of the model)."""


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """What the whole batch's output looks like.

    Args:
        prompt: input ids that outputs begin with, padding included (samples, tokens); None: outputs are new tokens only.
        columns: the prompt columns, ``first, last + 1``, that a part was given.
        num_return_sequences: output rows a sample.
        num_beams: rows of scores a sample.
        pad_token_id: fills rows up to the longest.
    """

    prompt: torch.Tensor | None
    columns: Callable[[int, int], tuple[int, int]]
    num_return_sequences: int
    num_beams: int
    pad_token_id: int | None


def _merged(parts: Sequence[_OutputPart], layout: _Layout) -> Any:
    """Tensors of token ids, or ``ModelOutput`` objects with scores, of consecutive parts (start, stop, output)."""
    first = parts[0][2]
    if hasattr(first, "untyped_storage"):
        return _merged_sequences(parts, layout)
    sequences = _merged_sequences([(a, b, output.sequences) for a, b, output in parts], layout)
    merged: dict[str, Any] = {"sequences": sequences}
    for name, value in first.items():
        if name not in ("sequences", "past_key_values"):
            merged[name] = _merged_field(name, value, [(a, b, output[name]) for a, b, output in parts], layout)
    return type(first)(**merged)


def _merged_field(name: str, value: Any, parts: list[_OutputPart], layout: _Layout) -> Any:
    import torch

    if name == "sequences_scores":
        return torch.cat([scores for _, _, scores in parts])
    if name == "beam_indices":
        width = max(indices.shape[1] for _, _, indices in parts)
        moved = [
            torch.where(i >= 0, i + start * layout.num_beams, i) for start, _, i in parts
        ]  # rows of the whole batch
        return torch.cat([_widen(indices, width, -1) for indices in moved])
    if isinstance(value, tuple) and all(hasattr(step, "untyped_storage") and step.ndim == 2 for step in value):
        return _merged_steps([steps for _, _, steps in parts], layout)
    raise ConfigError(f"`{name}` of a split batch cannot be put together; call model.generate for it")


def _merged_steps(parts: list[tuple[torch.Tensor, ...]], layout: _Layout) -> tuple[torch.Tensor, ...]:
    """(rows, vocabulary) for every step. A part that had ended is certain of the padding token."""
    import torch

    def step(steps: tuple[torch.Tensor, ...], at: int) -> torch.Tensor:
        if at < len(steps):
            return steps[at]
        ended = torch.full_like(steps[0], -math.inf)
        ended[:, _pad(layout)] = 0
        return ended

    return tuple(torch.cat([step(steps, at) for steps in parts]) for at in range(max(map(len, parts))))


def _merged_sequences(parts: Sequence[_OutputPart], layout: _Layout) -> torch.Tensor:
    import torch

    rows = []
    for start, stop, sequences in parts:
        if layout.prompt is None:
            rows.append(sequences)
            continue
        first, last = layout.columns(start, stop)
        prompt = layout.prompt[start:stop].repeat_interleave(layout.num_return_sequences, dim=0)
        rows.append(torch.cat([prompt.to(sequences.device), sequences[:, last - first :]], dim=1))
    width = max(part.shape[1] for part in rows)
    return torch.cat([part if part.shape[1] == width else _widen(part, width, _pad(layout)) for part in rows])


def _widen(rows: torch.Tensor, width: int, value: int) -> torch.Tensor:
    import torch

    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=value)


def _pad(layout: _Layout) -> int:
    if layout.pad_token_id is None:
        raise ConfigError(
            "parts ended after different numbers of tokens, but no padding token is known; give `pad_token_id`"
        )
    return layout.pad_token_id

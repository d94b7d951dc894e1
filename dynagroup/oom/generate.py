"""``model.generate`` that goes on in parts when memory runs out, with the output it would have had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from dynagroup.budget.learning import LearningBudget
from dynagroup.device import watch_of
from dynagroup.errors import ConfigError
from dynagroup.oom.retry import Parts
from dynagroup.oom.split import BatchSplitter, VisionTokens, longest_of
from dynagroup.shapes import BatchShape

if TYPE_CHECKING:
    import torch

_REFUSED = (
    "streamer", "synced_gpus", "return_dict_in_generate", "past_key_values", "encoder_outputs", "prefix_allowed_tokens_fn",
)  # fmt: skip
_learned_by_model: WeakKeyDictionary[Any, LearningBudget] = WeakKeyDictionary()


class Generated(NamedTuple):
    """The token ids that ``generate`` gives for the whole batch, and how often the batch was split for it."""

    output: torch.Tensor
    num_splits: int


def generate_with_oom_retry(
    model: Any, batch: Any, *,
    min_samples: int = 1, pad_token_id: int | None = None, learned: LearningBudget | None = None,
    indices: Sequence[int] = (), **generate_kwargs: Any,
) -> Generated:  # fmt: skip
    """``model.generate(**batch, **generate_kwargs)``, in parts where the whole does not fit.

    The output is the unsplit one's: samples in input order, padded alike, prompts with their padding. Greedy and beam search
    give the same tokens, sampling draws other random numbers after a split. What has run out of memory is split beforehand
    from then on.

    Args:
        batch: what the tokenizer or processor returned, or input ids (samples, tokens).
        min_samples: a part of fewer than twice as many samples is not cut any more.
        pad_token_id: fills finished samples; default: the model's, else its first end-of-sequence token.
        learned: what to learn into; default: one for each model, kept as long as the model.
        indices: dataset indices of the samples, to name them in messages.

    Raises:
        BudgetError: a part that cannot be cut further does not fit; names the samples and their shapes.
        ConfigError: what cannot be honoured in parts: a streamer, ``synced_gpus``, ``return_dict_in_generate``, a cache.

    >>> output, num_splits = generate_with_oom_retry(model, batch, max_new_tokens=64)  # doctest: +SKIP
    """
    data = {**batch} if isinstance(batch, Mapping) else {"input_ids": batch}
    check_options(model, {**data, **generate_kwargs})
    if pad_token_id is not None:
        generate_kwargs["pad_token_id"] = pad_token_id
    if learned is None:
        learned = _learned_by_model.setdefault(model, LearningBudget())
    return Generating(model, data, generate_kwargs, learned, indices, min_samples=min_samples).generated()


class Generating(Parts[Any]):
    """One batch to generate for: how it splits, what each part is given, and how the parts' outputs fit together."""

    def __init__(
        self, model: Any, batch: Mapping[str, Any], kwargs: Mapping[str, Any], learned: LearningBudget,
        indices: Sequence[int], *, min_samples: int = 1,
    ) -> None:  # fmt: skip
        self.model, self.watch = model, watch_of(model)
        self.kwargs = {name: value for name, value in kwargs.items() if not is_data(value)}
        self.batch = {**batch, **{name: value for name, value in kwargs.items() if name not in self.kwargs}}
        # Parts stay as wide as the batch: some options look at padding, or count from the left.
        splitter = BatchSplitter(trim=False, vision=VisionTokens.from_config(model.config))
        run = lambda part: model.generate(**part, **self.kwargs)  # noqa: E731
        super().__init__(run, self.batch, splitter, learned, min_samples, indices)

    def generated(self) -> Generated:
        """What the whole gives."""
        rows = self.run_all()
        return Generated(rows[0] if len(rows) == 1 else self._merged(rows), len(rows) - 1)

    def shape(self, start: int, stop: int) -> BatchShape:
        """What memory grows with: every beam and returned sequence, at its full length in the end."""
        new, total, width = self._option("max_new_tokens"), self._option("max_length"), longest_of(self.batch)
        if new is None and total is not None:
            new = total if self.model.config.is_encoder_decoder else max(total - width, 0)
        new = 20 if new is None else new  # transformers' default
        copies = max(self._option(name) or 1 for name in ("num_beams", "num_return_sequences"))
        return BatchShape.of((stop - start) * copies, width + new)

    def _option(self, name: str) -> Any:
        return generation_option(name, self.model, self.kwargs)

    def _merged(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Token ids of consecutive parts as the whole's, which ends where the longest ends."""
        import torch

        width = max(part.shape[1] for part in rows)
        fill = self._pad_token_id() if any(part.shape[1] < width for part in rows) else 0
        return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1]), value=fill) for part in rows])

    def _pad_token_id(self) -> int:
        pad, eos = self._option("pad_token_id"), self._option("eos_token_id")
        first_eos = eos[0] if isinstance(eos, (list, tuple)) else eos
        if pad is None or (pad == 0 and (self._option("num_beams") or 1) > 1 and first_eos is not None):
            pad = first_eos  # transformers' beam search takes a padding token 0 for none
        if pad is None:
            raise ConfigError("parts end after different numbers of tokens: give `pad_token_id` to fill them")
        return int(pad)


def check_options(model: Any, given: Mapping[str, Any]) -> None:
    """Refuse what cannot be honoured in parts, also where the model's own generation config asks for it."""
    for name in _REFUSED:
        if generation_option(name, model, given) not in (None, False):
            raise ConfigError(f"`{name}` cannot be used with out-of-memory retry, in parts; call model.generate")


def generation_option(name: str, model: Any, kwargs: Mapping[str, Any]) -> Any:
    """What ``generate`` takes an option to be: its argument, its ``generation_config``, the model's; None if unsaid."""
    for source in (kwargs, kwargs.get("generation_config"), getattr(model, "generation_config", None)):
        value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
        if value is not None:
            return value
    return None


def is_data(value: Any) -> bool:
    """Whether a keyword of ``generate`` has an entry per sample, and belongs to the batch."""
    return hasattr(value, "untyped_storage") and value.ndim > 0

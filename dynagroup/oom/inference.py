"""A whole dataset through a model: generate, embed or classify; planned, safe from running out of memory and from crashes."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.oom.generate import check_options, generate_in_parts, generation_option, is_data
from dynagroup.oom.jobs import Job, longest_input
from dynagroup.oom.retry import run_with_oom_retry
from dynagroup.oom.split import BatchSplitter
from dynagroup.oom.storage import TEXTS
from dynagroup.validation import check_choice, check_int

if TYPE_CHECKING:
    import torch

__all__ = [
    "classify_dataset", "embed_dataset", "encode", "generate_dataset", "iter_classify", "iter_embed", "iter_generate",
]  # fmt: skip

Pooling: TypeAlias = Literal["mean", "first", "last"]

# what sentence-transformers calls it -> what it is here
_POOLINGS: dict[str, Pooling] = {"cls_token": "first", "mean_tokens": "mean", "lasttoken": "last"}
_POOLINGS |= {"cls": "first", "mean": "mean"}
_NEW_TOKENS = 128
_OF_A_BATCH = {"inputs", "input_ids", "attention_mask", "inputs_embeds", "position_ids", "past_key_values"}


def generate_dataset(
    model: Any, tokenizer: Any, texts: Sequence[str], *,
    batch_size: int | None = None, budget: Budget | None = None, output: str | Path | None = None,
    max_length: int | None = None, max_new_tokens: int | None = None, progress: bool = True,
    world: World | None = None, learned: LearningBudget | None = None, **generate_kwargs: Any,
) -> list[Any]:  # fmt: skip
    """Generate for every text: what a loop over ``model.generate`` gives, in fewer and fuller batches.

    Batches are planned by length, longest first. One that does not fit after all is split, and the rest is planned again
    with what that taught. Under ``torchrun`` every rank takes its share; all return all results.

    Args:
        model: a transformers model that generates, where it is to run.
        batch_size: samples of the longest kind that fit the device; other batches hold more (:class:`~dynagroup.MemoryBudget`);
            default: 16.
        budget: what fits, instead of ``batch_size``.
        output: a ``.jsonl`` or ``.parquet`` file, one row a text in input order. Finished samples are kept beside it as
            they come, so that the same call after a crash does only the rest, and once all is done gives it back. Needed on
            several ranks.
        max_length: longer texts are truncated to so many tokens.
        max_new_tokens: tokens generated for a text, at most; default: the generation config's, else 128.
        progress: show samples and tokens a second, and the time left.
        world: ranks that share the work; default: all of ``torch.distributed``, which then wait for each other however
            long it takes.
        learned: what to learn into; its report says what running out of memory has cost.
        generate_kwargs: further arguments of ``generate``; none that belongs to one batch.

    Returns:
        The generated texts without their prompts, in input order; lists of them with ``num_return_sequences`` above 1.

    Raises:
        ConfigError: arguments that do not go together; a text that the model has no positions for.
        StateError: ``output``, or what was kept beside it, is of another job or damaged: says what differs, or which file.
        BudgetError: a text does not fit even alone; names it.

    >>> answers = generate_dataset(model, tokenizer, texts, max_new_tokens=64, output="answers.jsonl")  # doctest: +SKIP
    """
    given = (model, tokenizer, texts, batch_size, budget, max_length, progress)
    return Generation(*given, learned, max_new_tokens=max_new_tokens, kwargs=generate_kwargs).whole(output, world)


def iter_generate(
    model: Any, tokenizer: Any, texts: Sequence[str], *,
    batch_size: int | None = None, budget: Budget | None = None, max_length: int | None = None,
    max_new_tokens: int | None = None, progress: bool = True, skip: Collection[int] = (),
    learned: LearningBudget | None = None, **generate_kwargs: Any,
) -> Iterator[tuple[int, Any]]:  # fmt: skip
    """(index, result) as they come, longest texts first, without those to ``skip``; nothing is kept.

    Other arguments as for :func:`generate_dataset`.
    """
    given = (model, tokenizer, texts, batch_size, budget, max_length, progress)
    return Generation(*given, learned, max_new_tokens=max_new_tokens, kwargs=generate_kwargs).as_they_come(skip)


def embed_dataset(
    model: Any, tokenizer: Any, texts: Sequence[str], *,
    pooling: Pooling = "mean", normalize: bool = False, batch_size: int | None = None,
    budget: Budget | None = None, output: str | Path | None = None, max_length: int | None = None,
    progress: bool = True, world: World | None = None,
) -> np.ndarray:  # fmt: skip
    """One vector a text, float32 (num_texts, features): the last hidden states, pooled over the text's tokens.

    Arguments as for :func:`generate_dataset`; ``output`` may also be a ``.npy`` file.

    Args:
        model: an encoder, or a causal model; of one with a head the part before it (``model.base_model``) is run.
        pooling: "mean" over the text's tokens, or the "first" or "last" of them.
        normalize: scale vectors to length 1.
        max_length: longer texts are truncated to so many tokens; default: to what model and tokenizer are made for (how many
            texts that shortens is logged).

    Raises:
        ConfigError: as there; or the model gives no hidden states.

    >>> embed_dataset(model, tokenizer, texts, pooling="mean", normalize=True).shape  # doctest: +SKIP
    (1000, 384)
    """
    given = (model, tokenizer, texts, batch_size, budget, max_length, progress)
    return Embedding(*given, pooling=pooling, normalize=normalize).whole(output, world)


def iter_embed(
    model: Any, tokenizer: Any, texts: Sequence[str], *,
    pooling: Pooling = "mean", normalize: bool = False, batch_size: int | None = None,
    budget: Budget | None = None, max_length: int | None = None, progress: bool = True, skip: Collection[int] = (),
) -> Iterator[tuple[int, np.ndarray]]:  # fmt: skip
    """(index, float32 vector) as they come, longest texts first, without those to ``skip``; nothing is kept.

    Other arguments as for :func:`embed_dataset`.

    >>> vectors = {index: vector for index, vector in iter_embed(model, tokenizer, texts)}  # doctest: +SKIP
    """
    given = (model, tokenizer, texts, batch_size, budget, max_length, progress)
    return Embedding(*given, pooling=pooling, normalize=normalize).as_they_come(skip)


def classify_dataset(
    model: Any, tokenizer: Any, texts: Sequence[str], *,
    batch_size: int | None = None, budget: Budget | None = None, output: str | Path | None = None,
    max_length: int | None = None, progress: bool = True, world: World | None = None,
) -> np.ndarray:  # fmt: skip
    """The logits of a sequence classifier, float32 (num_texts, classes). Arguments as for :func:`embed_dataset`."""
    given = (model, tokenizer, texts, batch_size, budget, max_length, progress)
    return Classification(*given).whole(output, world)


def iter_classify(
    model: Any, tokenizer: Any, texts: Sequence[str], *,
    batch_size: int | None = None, budget: Budget | None = None, max_length: int | None = None,
    progress: bool = True, skip: Collection[int] = (),
) -> Iterator[tuple[int, np.ndarray]]:  # fmt: skip
    """(index, float32 logits) as they come, longest texts first; nothing is kept. Arguments as for :func:`iter_embed`."""
    given = (model, tokenizer, texts, batch_size, budget, max_length, progress)
    return Classification(*given).as_they_come(skip)


def encode(
    model: Any, texts: Sequence[str], *,
    tokenizer: Any = None, batch_size: int = 32, pooling: Pooling | None = None, normalize: bool | None = None,
    max_length: int | None = None, output: str | Path | None = None, device: Any = None, progress: bool = True,
) -> np.ndarray:  # fmt: skip
    """One vector a text, float32 (num_texts, features), in batches as large as the ``batch_size`` longest texts' memory.

    A folder or name is loaded; if it was made for sentence-transformers, its own pooling, normalisation and longest input
    are used, so that vectors are those that ``SentenceTransformer(model).encode(texts)`` gives.

    Args:
        model: folder or name, or a loaded transformers model (then with its ``tokenizer``).
        pooling: default: what the folder says, else "mean".
        normalize: scale vectors to length 1; default: what the folder says, else no.
        max_length: default: what the folder says, else what model and tokenizer are made for.
        device: where a model that is loaded here goes; default: a GPU if there is one.
        output: as for :func:`~dynagroup.embed_dataset`.

    Raises:
        ConfigError: the folder asks for something else than pooling and normalising; or no tokenizer.

    >>> encode("sentence-transformers/all-MiniLM-L6-v2", texts).shape  # doctest: +SKIP
    (1000, 384)
    """
    said = _Recipe()
    if isinstance(model, (str, Path)):
        said = _recipe_of(str(model))
        model, tokenizer = _load(str(model), tokenizer, device)
    if tokenizer is None:
        raise ConfigError("`tokenizer` is needed with a model that is loaded already")
    return embed_dataset(
        model, tokenizer, texts, pooling=pooling or said.pooling, output=output, batch_size=batch_size, progress=progress,
        normalize=said.normalize if normalize is None else normalize, max_length=max_length or said.max_length,
    )  # fmt: skip


@dataclass(frozen=True)
class _Recipe:
    pooling: Pooling = "mean"
    normalize: bool = False
    max_length: int | None = None


def _load(name: str, tokenizer: Any, device: Any) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModel, AutoTokenizer

    place = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModel.from_pretrained(name).eval().to(place)
    return model, tokenizer if tokenizer is not None else AutoTokenizer.from_pretrained(name)


def _recipe_of(name: str) -> _Recipe:
    """What a folder of sentence-transformers says; the default for any other."""
    modules = _read(name, "modules.json")
    if modules is None:
        return _Recipe()
    kinds = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
    unknown = sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"})
    if unknown:
        raise ConfigError(
            f"{name!r} puts {', '.join(unknown)} after its model, which encode() does not run; use sentence-transformers, or "
            "embed_dataset() and do it yourself"
        )
    limit = (_read(name, "sentence_bert_config.json") or {}).get("max_seq_length")
    pooling = _pooling(name, _read(name, f"{kinds['Pooling']}/config.json") or {}) if "Pooling" in kinds else "mean"
    return _Recipe(pooling, "Normalize" in kinds, limit)


def _pooling(name: str, config: dict[str, Any]) -> Pooling:
    asked = [key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on]
    asked += [mode for mode in [config.get("pooling_mode")] if isinstance(mode, str)]
    if len(asked) != 1 or asked[0] not in _POOLINGS:
        raise ConfigError(
            f"{name!r} pools by {asked or config!r}, which encode() does not; give `pooling` and use embed_dataset"
        )
    return _POOLINGS[asked[0]]


def _read(name: str, file: str) -> Any:
    from transformers.utils.hub import cached_file

    path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


class Generation(Job):
    """New tokens, as texts. ``given``: what every job is given, the model first."""

    kind, mode = TEXTS, "generate"

    def __init__(self, *given: Any, max_new_tokens: int | None, kwargs: dict[str, Any]) -> None:
        super().__init__(*given)
        model, self._kwargs = self.model, kwargs
        if not callable(getattr(model, "generate", None)):
            raise ConfigError(f"`model` must be one that generates, but a {type(model).__name__} has no generate()")
        check_options(model, kwargs)
        wrong = [name for name, value in kwargs.items() if name in _OF_A_BATCH or is_data(value)]
        if wrong:
            raise ConfigError(f"`{wrong[0]}` belongs to one batch, and a job makes its batches itself; leave it out")
        new = max_new_tokens if max_new_tokens is not None else self._option("max_new_tokens")
        self.new_tokens = check_int("max_new_tokens", _NEW_TOKENS if new is None else new)
        self._each = self._option("num_return_sequences") or 1
        self.copies = max(self._option("num_beams") or 1, self._each)
        self._is_causal = not model.config.is_encoder_decoder
        self.padding_side = "left" if self._is_causal else "right"
        told = {"max_length": self.max_length, "max_new_tokens": self.new_tokens}
        self.settings = {"task": "generate", **told, "arguments": kwargs}

    def _option(self, name: str) -> Any:
        return generation_option(name, self.model, self._kwargs)

    def process(self, batch: dict[str, Any], indices: Sequence[int]) -> list[Any]:
        options = _with_new_tokens(self._kwargs, self.new_tokens)
        if self._option("stop_strings"):
            options["tokenizer"] = self.tokenizer
        multiple = self.budget.pad_to_multiple_of
        done = generate_in_parts(
            self.model, batch, options, learned=self.learned, indices=indices, pad_to_multiple_of=multiple
        )
        tokens = done.sequences[:, batch["input_ids"].shape[1] :] if self._is_causal else done.sequences
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return texts if self._each == 1 else [texts[i : i + self._each] for i in range(0, len(texts), self._each)]


def _with_new_tokens(kwargs: dict[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """In the generation config, where one is given: ``generate`` does not want both."""
    if kwargs.get("generation_config") is None:
        return {**kwargs, "max_new_tokens": max_new_tokens}
    config = copy.deepcopy(kwargs["generation_config"])
    config.max_new_tokens = max_new_tokens
    return {**kwargs, "generation_config": config}


class Forward(Job):
    """A forward pass without gradients; one row of ``outputs`` a text."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._shorten_to(longest_input(self.model, self.tokenizer))
        self.settings = {"task": "classify", "max_length": self.max_length}

    def outputs(self, batch: dict[str, Any]) -> torch.Tensor:
        """(samples, features) on the model's device."""
        raise NotImplementedError

    def process(self, batch: dict[str, Any], indices: Sequence[int]) -> np.ndarray:
        import torch

        splitter = BatchSplitter(trim="right", pad_to_multiple_of=self.budget.pad_to_multiple_of)
        run_whole = lambda part: self.outputs(part).cpu()  # noqa: E731
        with torch.inference_mode():
            rows = run_with_oom_retry(run_whole, batch, split=splitter, learned=self.learned, indices=indices)
        return torch.cat(rows).float().numpy()

    def _field(self, batch: dict[str, Any], name: str, way_out: str) -> Any:
        """What is needed of the model's output."""
        output = self.model(**batch)
        found = getattr(output, name, None)
        if found is None:
            has = ", ".join(output) if isinstance(output, Mapping) else type(output).__name__
            raise ConfigError(f"this task takes a model whose output has `{name}`, but it has {has}: {way_out}")
        return found


class Embedding(Forward):
    """Hidden states, pooled over a text's tokens."""

    def __init__(self, model: Any, *given: Any, pooling: Pooling, normalize: bool) -> None:
        check_choice("pooling", pooling, ("mean", "first", "last"))
        self._pooling: Pooling = pooling
        self._normalize = normalize
        inner = _without_head(model)
        if getattr(getattr(inner, "config", None), "is_encoder_decoder", False) and hasattr(inner, "decoder"):
            raise ConfigError(
                f"`model` is a {type(model).__name__}, whose hidden states are its decoder's: use its encoder "
                "(model.get_encoder())"
            )
        super().__init__(inner, *given)
        self.settings |= {"task": f"embed {pooling}", "normalize": int(normalize)}

    def outputs(self, batch: dict[str, Any]) -> torch.Tensor:
        import torch

        states = self._field(batch, "last_hidden_state", "give the model without its head, as AutoModel loads it")
        pooled = _pool(states, batch["attention_mask"], self._pooling)
        return torch.nn.functional.normalize(pooled, dim=1) if self._normalize else pooled


class Classification(Forward):
    """The logits of a sequence classifier."""

    def outputs(self, batch: dict[str, Any]) -> torch.Tensor:
        way_out = "give the model with a head, as AutoModelForSequenceClassification loads it"
        logits = self._field(batch, "logits", way_out)
        if logits.ndim != 2:
            raise ConfigError(
                f"a classifier's `logits` are (samples, classes), but this model's are {tuple(logits.shape)}: {way_out}"
            )
        return logits.float()


def _without_head(model: Any) -> Any:
    """The part that gives hidden states: a language model's own output is a number for every word of its vocabulary."""
    module = sys.modules.get("transformers.modeling_utils")  # whoever holds such a model has imported it
    inner = _without_adapter(model)
    return inner.base_model if module is not None and isinstance(inner, module.PreTrainedModel) else model


def _without_adapter(model: Any) -> Any:
    """A model of peft without its outer layer, where its adapters are in the layers beneath, which then still run."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    config, tuner = model.active_peft_config, sys.modules["peft.tuners.tuners_utils"].BaseTuner
    around = config.is_prompt_learning or type(model.base_model).forward is not tuner.forward
    return model if around or getattr(config, "alora_invocation_tokens", None) else model.get_base_model()


def _pool(states: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    import torch

    num_tokens = mask.sum(1)
    if pooling == "mean":  # summed in float32: bfloat16 cannot count beyond 256
        total = (states * mask.unsqueeze(-1).to(states.dtype)).sum(1, dtype=torch.float32)
        return total / num_tokens.clamp(min=1).unsqueeze(-1)
    position = torch.zeros_like(num_tokens) if pooling == "first" else (num_tokens - 1).clamp(min=0)
    return states[torch.arange(len(states), device=states.device), position].float()

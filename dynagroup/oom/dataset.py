"""A whole dataset through a model: planned, safe from running out of memory, and from crashes."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dynagroup.budget.base import UNLIMITED, BoolArray, Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.memory import MemoryBudget
from dynagroup.errors import ConfigError
from dynagroup.lengths import measure_lengths
from dynagroup.memory import MemoryRegressor, Workload
from dynagroup.memory.run import Mode
from dynagroup.oom.generate import generate_with_oom_retry
from dynagroup.oom.journal import Journal, read_results
from dynagroup.oom.retry import run_with_oom_retry
from dynagroup.oom.split import BatchSplitter
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import TOKENS, BatchShape, IntArray
from dynagroup.world import World, current_world

if TYPE_CHECKING:
    import torch

__all__ = ["classify_dataset", "embed_dataset", "generate_dataset"]

Pooling = Literal["mean", "first", "last"]
Process = Callable[[dict[str, Any]], list[Any]]


def generate_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_size: int | None = 16,
    budget: Budget | None = None,
    output: str | Path | None = None,
    max_length: int | None = None,
    max_new_tokens: int = 128,
    progress: bool = True,
    world: World | None = None,
    learned: LearningBudget | None = None,
    **generate_kwargs: Any,
) -> list[Any]:
    """Generate for every text: what a loop over ``model.generate`` gives, in fewer and fuller batches.

    Batches are planned by length, longest first. One that does not fit after all is split, and the rest is planned again
    with what that taught. Under ``torchrun`` every rank takes its share; all return all results.

    Args:
        batch_size: samples of the longest kind that fit the device; other batches hold more (:class:`~dynagroup.MemoryBudget`).
        budget: what fits, instead of ``batch_size``.
        output: a ``.jsonl`` or ``.parquet`` file, one row a text in input order. Finished samples are kept beside it as
            they come, so that the same call after a crash does only the rest. Needed on several ranks.
        max_length: longer texts are truncated to so many tokens.
        max_new_tokens: tokens generated for a text, at most.
        progress: show samples and tokens a second, and the time left.
        learned: what to learn into; its report says what running out of memory has cost.
        generate_kwargs: further arguments of ``generate``.

    Returns:
        The generated texts without their prompts, in input order; lists of them with ``num_return_sequences`` above 1.
    """
    learned = learned if learned is not None else LearningBudget()
    causal = not model.config.is_encoder_decoder
    copies = max(generate_kwargs.get("num_beams") or 1, generate_kwargs.get("num_return_sequences") or 1)
    each = generate_kwargs.get("num_return_sequences") or 1

    def process(batch: dict[str, Any]) -> list[Any]:
        done = generate_with_oom_retry(model, batch, learned=learned, max_new_tokens=max_new_tokens, **generate_kwargs)
        new = done.sequences[:, batch["input_ids"].shape[1] :] if causal else done.sequences
        decoded = tokenizer.batch_decode(new, skip_special_tokens=True)
        return decoded if each == 1 else [decoded[i : i + each] for i in range(0, len(decoded), each)]

    run = _Run(
        model,
        tokenizer,
        texts,
        _budget(batch_size, budget, model, "generate", max_new_tokens=max_new_tokens),
        max_length,
        learned,
    )
    run.grows = (copies, max_new_tokens)
    run.padding_side = "left" if causal else "right"
    return run(process, output, f"generate {max_new_tokens} {sorted(generate_kwargs.items())!r}", progress, world)


def embed_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    pooling: Pooling = "mean",
    normalize: bool = False,
    batch_size: int | None = 16,
    budget: Budget | None = None,
    output: str | Path | None = None,
    max_length: int | None = None,
    progress: bool = True,
    world: World | None = None,
) -> np.ndarray:
    """One vector a text, float32 (num_texts, features): the last hidden states, pooled over the text's tokens.

    Arguments as for :func:`generate_dataset`; ``normalize`` scales vectors to length 1.
    """
    if pooling not in ("mean", "first", "last"):
        raise ConfigError(f"`pooling` must be 'mean', 'first' or 'last', but is {pooling!r}")

    def vectors(batch: dict[str, Any]) -> torch.Tensor:
        import torch

        pooled = _pool(model(**batch).last_hidden_state, batch["attention_mask"], pooling).float()
        return torch.nn.functional.normalize(pooled, dim=1) if normalize else pooled

    run = _Run(model, tokenizer, texts, _budget(batch_size, budget, model, "forward"), max_length, LearningBudget())
    rows = run(run.forward(vectors), output, f"embed {pooling} {normalize}", progress, world)
    return np.asarray(rows, dtype=np.float32)


def classify_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_size: int | None = 16,
    budget: Budget | None = None,
    output: str | Path | None = None,
    max_length: int | None = None,
    progress: bool = True,
    world: World | None = None,
) -> np.ndarray:
    """The logits of a sequence classifier, float32 (num_texts, classes). Arguments as for :func:`generate_dataset`."""
    run = _Run(model, tokenizer, texts, _budget(batch_size, budget, model, "forward"), max_length, LearningBudget())
    rows = run(run.forward(lambda batch: model(**batch).logits.float()), output, "classify", progress, world)
    return np.asarray(rows, dtype=np.float32)


class _Run:
    """One pass over a dataset."""

    grows: tuple[int, int] = (1, 0)
    padding_side: str | None = None

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        texts: Sequence[str],
        budget: Budget,
        max_length: int | None,
        learned: LearningBudget,
    ) -> None:
        if getattr(tokenizer, "pad_token_id", None) is None:
            raise ConfigError(
                "`tokenizer` has no padding token; set one, e.g. tokenizer.pad_token = tokenizer.eos_token"
            )
        self._model, self._tokenizer, self._texts = model, tokenizer, texts
        self._max_length, self._learned = max_length, learned
        self._lengths = np.asarray(measure_lengths(texts, tokenizer, max_length=max_length), dtype=np.int32)
        self._budget = budget.bind({TOKENS: self._lengths})

    def __call__(
        self, process: Process, output: str | Path | None, job: str, progress: bool, world: World | None
    ) -> list[Any]:
        world = world if world is not None else current_world()
        if output is None and world.size > 1:
            raise ConfigError("on several ranks `output` must name a file that all of them can reach")
        results: dict[int, Any] = {}
        journal = None if output is None else Journal(Path(output), self._name(job), len(self._texts))
        finished = set() if journal is None else journal.finished()
        world.all_max([0])  # every rank has read what was finished before any adds to it
        if journal is not None:
            journal.open(world.rank)
        shares = list(self._batches([i for i in range(len(self._texts)) if i not in finished]))[
            world.rank :: world.size
        ]
        with closing(journal) if journal is not None else nullcontext():
            kept = results if journal is None else journal
            self._work(process, shares, kept, len(finished), progress and world.rank == 0)
        if journal is None:
            return [results[i] for i in range(len(self._texts))]
        world.all_max([0])  # all have finished
        if world.rank == 0:
            journal.publish()
        world.all_max([0])  # the output is there
        return read_results(Path(output or ""))

    def _work(
        self, process: Process, shares: list[list[int]], kept: Journal | dict[int, Any], num_finished: int, shown: bool
    ) -> None:
        with _Bar(self._lengths, num_finished, [i for batch in shares for i in batch], shown) as bar:
            for indices, values in self._process(process, shares):
                if isinstance(kept, Journal):
                    kept.append(indices, values)
                else:
                    kept.update(zip(indices, values, strict=True))
                bar.add(indices)

    def forward(self, outputs: Callable[[dict[str, Any]], torch.Tensor]) -> Process:
        """Run a forward pass without gradients; one row of its output a sample."""

        def process(batch: dict[str, Any]) -> list[Any]:
            import torch

            with torch.inference_mode():
                rows = run_with_oom_retry(
                    lambda part: outputs(part).cpu(), batch, split=BatchSplitter(trim="right"), learned=self._learned
                )
            return torch.cat(rows).tolist()

        self.padding_side = "right"
        return process

    def _process(self, process: Process, shares: list[list[int]]) -> Iterator[tuple[list[int], list[Any]]]:
        """Run this rank's batches; once something has been learned, plan what is left of them again."""
        while shares:
            limit = self._learned.state_dict()["allowed"]
            for at, indices in enumerate(shares):
                yield indices, process(self._encode(indices))
                if self._learned.state_dict()["allowed"] != limit:
                    shares = list(self._batches([i for batch in shares[at + 1 :] for i in batch]))
                    break
            else:
                return

    def _batches(self, samples: list[int]) -> Iterator[list[int]]:
        if samples:
            known = self._budget & _Grown(self._learned, *self.grows) if self._learned.has_learned else self._budget
            sampler = LengthAwareBatchSampler(self._lengths[samples], known, rank=0, world_size=1)
            yield from ([samples[i] for i in batch] for batch in sampler)

    def _encode(self, indices: list[int]) -> dict[str, Any]:
        short = {} if self._max_length is None else {"truncation": True, "max_length": self._max_length}
        encoded = self._tokenizer([self._texts[i] for i in indices], **short)
        multiple = self._budget.pad_to_multiple_of
        # Texts without any token still need one position: an empty tensor has no dtype that an embedding accepts.
        width: Any = {"padding": "longest"} if any(encoded["input_ids"]) else {"padding": "max_length", "max_length": 1}
        padded = self._tokenizer.pad(
            encoded,
            **width,
            padding_side=self.padding_side,
            pad_to_multiple_of=multiple if multiple > 1 else None,
            return_tensors="pt",
        )
        return {name: padded[name].to(self._model.device) for name in ("input_ids", "attention_mask")}

    def _name(self, job: str) -> str:
        crc = 0
        for text in self._texts:
            crc = zlib.crc32(text.encode(), crc)
        name = getattr(self._model.config, "name_or_path", "") or type(self._model).__name__
        return f"{job} {name} {len(self._texts)} texts {crc:08x} max_length={self._max_length}"


class _Grown(Budget):
    """What has been learned about whole generations, asked about prompts: every copy grows by the new tokens."""

    def __init__(self, learned: LearningBudget, copies: int, new_tokens: int) -> None:
        self._learned, self._copies, self._new_tokens = learned, copies, new_tokens

    def fits(self, shape: BatchShape, /) -> BoolArray:
        grown = BatchShape.of(shape.num_samples * self._copies, shape.longest[TOKENS] + self._new_tokens)
        return self._learned.allows(grown)

    def largest(self, longest: IntArray, /) -> IntArray | None:
        limit, wall = (UNLIMITED if x is None else x for x in self._learned.state_dict()["allowed"])
        each = self._copies * np.maximum(longest + self._new_tokens, 1)
        return np.minimum(np.floor(limit / each), np.ceil(wall / each) - 1).astype(np.int64)


class _Bar:
    """Progress in tokens, which time follows, with samples beside them."""

    def __init__(self, lengths: np.ndarray, num_finished: int, samples: list[int], shown: bool) -> None:
        from tqdm.auto import tqdm

        self._lengths, self._num_samples, self._num_done = lengths, len(samples), 0
        total = int(lengths[samples].sum()) if samples else 0
        self._bar = tqdm(
            total=total, unit="tok", unit_scale=True, disable=not shown, desc=f"{num_finished} done before"
        )
        self._started = time.perf_counter()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, indices: Sequence[int]) -> None:
        self._num_done += len(indices)
        rate = self._num_done / max(time.perf_counter() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{self._num_done}/{self._num_samples} samples, {rate:.1f} samples/s", refresh=False)
        self._bar.update(int(self._lengths[list(indices)].sum()))


def _budget(
    batch_size: int | None, budget: Budget | None, model: Any, mode: Mode, max_new_tokens: int | None = None
) -> Budget:
    """The user's, or one that knows the model."""
    if budget is not None:
        return budget
    try:
        workload = Workload.from_model(model, mode, max_new_tokens=max_new_tokens or 0)
    except ConfigError:  # not a model of transformers
        workload = Workload(mode=mode, max_new_tokens=max_new_tokens)
    return MemoryBudget(batch_size, model=MemoryRegressor.pretrained(workload))


def _pool(states: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    import torch

    if pooling == "mean":
        weights = mask.unsqueeze(-1).to(states.dtype)
        return (states * weights).sum(1) / weights.sum(1).clamp(min=1)
    position = torch.zeros_like(mask[:, 0]) if pooling == "first" else (mask.sum(1) - 1).clamp(min=0)
    return states[torch.arange(len(states), device=states.device), position]

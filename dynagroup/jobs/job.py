"""Runs a model over many texts in planned batches, on several ranks; recovers from memory errors and crashes."""

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from dynagroup.budget.base import Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.memory import MemoryBudget
from dynagroup.budget.tokens import as_budget
from dynagroup.distributed import World, current_world
from dynagroup.errors import ConfigError
from dynagroup.fingerprint import described, hashed, tokenizer_text
from dynagroup.jobs.storage import VECTORS, Kind, Output
from dynagroup.lengths import limit_of
from dynagroup.memory import MemoryRegressor
from dynagroup.memory.phases import Mode
from dynagroup.memory.protocols import PaddedTokens
from dynagroup.plan.cost import Work
from dynagroup.plan.few_shapes import few_shapes
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import TOKENS
from dynagroup.text.loader import pad_texts
from dynagroup.text.measure import by_position, measure_lengths
from dynagroup.update.filling import FillingCollator
from dynagroup.validation import check_identity, check_int

_log = logging.getLogger(__name__)
_PATIENCE_S = (
    30 * 24 * 3600.0
)  # a month: ranks wait for each other; dead ranks close their connections
_UNSET = 10**9  # a tokenizer's limit above this means none (it reports 10**30)
_AT_ONCE = 2**26  # bytes of weights that are copied from a device at a time
_WHERE_FROM = {
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "transformers_version",
    "_from_model_config",
}
_HOW = {
    "use_cache",
    "attn_implementation",
    "_attn_implementation",
    "dtype",
    "torch_dtype",
    "architectures",
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a job does with each batch, and the format of its results."""

    model: Any
    process: "Callable[[Job, dict[str, Any], Sequence[int]], Any]"
    """``(job, padded batch, indices of its samples) -> results of the samples``."""
    settings: Mapping[
        str, Any
    ]  # settings on which results depend, besides model, tokenizer and texts
    kind: Kind = VECTORS
    mode: Mode = "forward"
    padding_side: Literal["left", "right"] = "right"
    copies: int = 1
    new_tokens: int = 0


class Job:
    """Runs texts through a model in planned batches, longest texts first. A batch that does not fit runs in parts."""

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        texts: Any,
        *,
        batch_size: int | None = None,
        budget: Budget | None = None,
        max_length: int | None = None,
        progress: bool = True,
        learned: LearningBudget | None = None,
        shapes: int | None = None,
        identity: Any = None,
    ) -> None:
        self._identity = check_identity(identity)
        if getattr(budget, "layout", "padded") == "packed":
            raise ConfigError(
                f"`budget` must have layout='padded', as these batches are padded, but is {budget!r}"
            )
        if batch_size is not None and budget is not None:
            raise ConfigError(
                f"`batch_size` ({batch_size!r}) and `budget` both limit a batch; pass only one of them"
            )
        self.task, self.tokenizer, self.texts, self._shapes = (
            task,
            tokenizer,
            by_position(texts),
            shapes,
        )
        self._given_budget = budget
        self._progress = progress
        self._batch_size = check_int("batch_size", 16 if batch_size is None else batch_size)
        self.learned = learned if learned is not None else LearningBudget()
        self._says_limit = max_length is None and task.mode == "forward"
        said = [
            getattr(tokenizer, "model_max_length", None),
            *_positions(task.model),
        ]  # the smallest limit is used
        said = min(
            (int(n) for n in said if isinstance(n, (int, float)) and 0 < n < _UNSET), default=None
        )
        self._max_length = said if self._says_limit else limit_of(max_length)

    def as_they_come(self, skip: Collection[int] = ()) -> Iterator[tuple[int, Any]]:
        """Yields (index, result) as batches finish, longest texts first."""
        self._prepare()
        batches = self._results({int(index) for index in skip})
        return (
            (index, result)
            for indices, results in batches
            for index, result in zip(indices, results, strict=True)
        )

    def whole(self, output: str | Path | None = None, world: World | None = None) -> Any:
        """Returns all results in input order; reads them from ``output`` if that file is complete."""
        first = (
            world or current_world()
        )  # ranks lost before the job are noticed within ten minutes, not a month
        if output is None and first.size == 1:
            found = dict(self.as_they_come())
            return self.task.kind.gather([found[i] for i in range(len(found))])
        outs: list[Output] = []
        _on_all(first, lambda: outs.append(self._out(output, first.size)))
        [out], world = outs, world or current_world(timeout_s=_PATIENCE_S)
        numbers = [int(hashed(repr(item), 12), 16) for item in out.identity.items()]
        numbers += [0] * (32 - len(numbers))  # jobs that differ may have other settings
        highest, lowest = world.all_max(numbers), world.all_max([-n for n in numbers])
        if what := ", ".join(
            name for name, a, b in zip(out.identity, highest, lowest, strict=False) if a != -b
        ):
            raise ConfigError(
                f"all ranks must run the same job, but have different {what}; give all ranks the same"
            )
        if _on_all(world, out.is_finished):
            if world.rank == 0 and len(self.texts):
                out.tell_of_earlier(len(self.texts))
        else:
            _on_all(world, self._prepare)
            with closing(out):
                self._finish(out, world)
        if world.rank == 0:
            out.clear()  # an earlier run may have been killed after writing the output
        return out.read()

    def _out(self, output: str | Path | None, num_ranks: int) -> Output:
        if output is None:
            raise ConfigError(
                f"{num_ranks} ranks need `output`, the path of a file that all ranks can read and write"
            )
        settings = {**self.task.settings, "max_length": self._max_length}
        identity = identity_of(
            self.task.model, self.tokenizer, self.texts, settings, self._identity
        )
        return Output(Path(output), identity, len(self.texts), self.task.kind)

    # Ranks wait for each other four times: until the first has locked the output; until all have read what was finished
    # before (only then may any add to it); until all have finished (then the first writes the output); and until it
    # exists. The lock is kept until then, so another process is either refused, or finds a complete output.
    def _finish(self, out: Output, world: World) -> None:
        if _on_all(
            world, lambda: world.rank == 0 and out.claim()
        ):  # another process has finished the job
            return
        finished: set[int] = set()
        _on_all(world, lambda: finished.update(out.finished()))
        if finished and world.rank == 0:
            out.tell_of_earlier(len(finished))
        _on_all(
            world,
            lambda: any(
                out.append(*found) for found in self._results(finished, world.rank, world.size)
            ),
        )
        _on_all(world, lambda: out.publish() if world.rank == 0 else None)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of every text, after truncation: int32 (N,)."""
        return measure_lengths(
            self.texts, self.tokenizer, max_length=self._max_length, progress=self._progress
        )

    @cached_property
    def budget(self) -> Budget:
        """The user's budget, or one made for the model, bound to the lengths."""
        task, budget = self.task, self._given_budget
        known: Any = partial(
            MemoryRegressor.of_model, task.model, task.mode, max_new_tokens=task.new_tokens
        )
        if budget is None:
            one_batch = len(self.texts) <= self._batch_size  # fits by assumption: no trace needed
            budget, known = MemoryBudget(self._batch_size), PaddedTokens if one_batch else known
        budget = as_budget(budget).with_memory(known).bind({TOKENS: self.lengths})
        if self._shapes is None or not len(self.texts):
            return budget
        return few_shapes(self._shapes, self.lengths, budget, window=len(self.texts))

    def _prepare(self) -> None:
        """Measures the texts before anything is run or written: on a GPU, a text that is too long ends the process."""
        lengths, (_, last) = self.lengths, _positions(self.task.model)
        new = self.task.new_tokens if self.task.padding_side == "left" else 0
        if last is not None and len(over := np.flatnonzero(lengths + new > last)):
            has = f"which has {last} positions: text {over[0]} has {lengths[over[0]]} tokens and {new} new ones"
            way_out = f"truncate with max_length={max(last - new, 1)}, or leave them out"
            raise ConfigError(f"{len(over)} texts are too long for the model, {has}; {way_out}")
        if self._says_limit and (num_full := int((lengths == self._max_length).sum())):
            cut = "%d of %d texts have at least %d tokens, the most that the model accepts, and are truncated to them"
            _log.warning(cut, num_full, len(lengths), self._max_length)

    def _results(
        self, done: Collection[int], rank: int = 0, size: int = 1
    ) -> Iterator[tuple[list[int], Any]]:
        """Yields (indices, results) of this rank's part of the samples that are not ``done``, whatever the budget."""
        from tqdm.auto import tqdm

        share = sorted(
            (i for i in range(len(self.texts)) if i not in done),
            key=lambda i: (-self.lengths[i], i),
        )[rank::size]
        shown, total = (
            self._progress and rank == 0,
            int(self.lengths[share].sum()),
        )  # progress in tokens, like time
        with (
            evaluating(self.task.model),
            tqdm(total=total, unit="tok", unit_scale=True, disable=not shown) as bar,
        ):
            for indices in self._batches(share):
                yield indices, self.task.process(self, self._encode(indices), indices)
                bar.update(int(self.lengths[indices].sum()))

    def _batches(self, samples: Sequence[int]) -> list[list[int]]:
        # Each new token takes a step. Its fixed time counts once for all copies of a text (beams, for example).
        work = Work.of_known(self.task.model, device=next(self.task.model.parameters()).device)
        steps = (
            1 if self.budget.new_tokens else max(self.task.new_tokens, 1)
        )  # a plan knows the budget's
        work = replace(work, per_step=work.per_step * steps / self.task.copies)
        sampler = LengthAwareBatchSampler(
            self.lengths[list(samples)], self.budget, work=work, rank=0, world_size=1
        )
        return [[samples[i] for i in batch] for batch in sampler]

    def _encode(self, indices: list[int]) -> dict[str, Any]:
        batch = pad_texts(
            self.tokenizer,
            [self.texts[index] for index in indices],
            self._max_length,
            padding_side=self.task.padding_side,
            pad_to_multiple_of=self.budget.pad_to_multiple_of,
        )
        if self.budget.ladder is not None:
            pad = {"input_ids": self.tokenizer.pad_token_id}
            batch = FillingCollator(None, self.budget.ladder, pad).fill(batch, len(indices))
        return {
            name: value.to(next(self.task.model.parameters()).device)
            for name, value in batch.items()
        }


def _on_all(world: World, act: Callable[[], bool | None]) -> bool:
    """Returns whether ``act`` returns true on any rank, after all have run it; an error on one is raised on all."""
    found, error = False, None
    try:
        found = bool(act())
    except (
        Exception
    ) as caught:  # raised again when all ranks know; the others first finish their part
        error = caught
        (_log.error if world.size > 1 else _log.debug)("rank %d failed: %r", world.rank, error)
    failed, anywhere = world.all_max([world.rank if error is not None else -1, int(found)])
    if error is not None:
        raise error
    if failed >= 0:
        raise ConfigError(
            f"rank {failed} of {world.size} could not continue the job; see that rank's error"
        )
    return bool(anywhere)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Context manager that turns off dropout; afterwards each module has its former mode."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _positions(model: Any) -> tuple[int | None, int | None]:
    """Returns how many tokens a model accepts by its config, and how many learned positions it has; None: unknown."""
    config = getattr(model, "config", None)
    stated = getattr(
        getattr(config, "get_text_config", lambda: config)(), "max_position_embeddings", None
    )
    for name, module in model.named_modules():
        rows, last = getattr(module, "num_embeddings", None), name.rpartition(".")[2]
        if (
            rows is None
            or stated is None
            or not ("position" in last or last == "wpe")
            or not 0 <= rows - stated <= 8
        ):
            continue
        padding = getattr(
            module, "padding_idx", None
        )  # RoBERTa skips positions up to it; OPT and BART use `offset`
        unused = getattr(module, "offset", 0 if padding is None else padding + 1)
        return stated, int(rows - unused) if rows > unused else None
    return stated, None


def identity_of(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str],
    settings: Mapping[str, Any],
    identity: Any = None,
) -> dict[str, Any]:
    """Returns what results are compared by, as text for JSON; equal in every process, wherever the model was loaded."""
    texts = list(texts)
    return {
        "model": f"{type(model).__name__} {_digest(_weights(model))}",
        "model's config": _said(getattr(model, "config", None)),
        "model's generation_config": _said(getattr(model, "generation_config", None)),
        "tokenizer": tokenizer_text(tokenizer),
        "texts": f"{len(texts)} texts {_digest(texts)}",
        "identity": identity,
        **{name: _said(value) for name, value in settings.items()},
    }


def _digest(parts: Iterable[str]) -> str:
    """Returns a hash of the parts, each in quotes, so that "ab", "c" and "a", "bc" have different hashes."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(ascii(str(part)).encode())
    return f"#{digest.hexdigest()}"


def _said(value: Any) -> str | int | None:
    if hasattr(value, "to_dict"):
        value = {
            k: v
            for k, v in value.to_dict().items()
            if v is not None and k not in _WHERE_FROM | _HOW
        }
    return value if value is None or type(value) in (int, str) else described(value)


def _weights(model: Any) -> Iterator[str]:
    for name, value in sorted({**dict(model.named_buffers()), **model.state_dict()}.items()):
        for tensor in (
            () if name.endswith("inv_freq") else _plain_tensors(value)
        ):  # inv_freq is computed from the config
            parts = (
                tensor.detach().reshape(-1).view(torch.uint8).split(_AT_ONCE)
            )  # weights may be many and on a device
            yield f"{name} {tensor.dtype} {tuple(tensor.shape)} {[crc32(part.cpu().numpy()) for part in parts]}"


def _plain_tensors(value: Any) -> Iterator[Any]:
    """Yields what a weight consists of: torch's quantized layers hold tuples, torchao's hold tensors made of others."""
    inner = (
        [getattr(value, name) for name in value.__tensor_flatten__()[0]]
        if hasattr(value, "__tensor_flatten__")
        else value
    )
    if isinstance(inner, (tuple, list)):
        yield from chain.from_iterable(map(_plain_tensors, inner))
    elif hasattr(value, "element_size"):
        yield value.dequantize() if value.is_quantized else value

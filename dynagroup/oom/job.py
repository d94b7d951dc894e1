"""A job: one pass over a dataset, what it is, and its results as a whole, also after crashes, also on many ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynagroup.distributed import World, current_world
from dynagroup.errors import ConfigError
from dynagroup.fingerprint import described, hashed
from dynagroup.oom.formats import Texts, Vectors
from dynagroup.oom.inference import Pass
from dynagroup.oom.storage import Output

if TYPE_CHECKING:
    import torch

__all__ = ["Job", "identity_of"]

_PATIENCE_S = 30 * 24 * 3600.0
"""Ranks wait so long for each other's batches. One that has died is noticed at once: its connections close."""
_AT_ONCE = 2**24  # elements widened to int64 at a time
_WHERE_FROM = {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "_from_model_config"}
_HOW = {"use_cache", "attn_implementation", "_attn_implementation", "dtype", "torch_dtype"}  # no matter of the results
_CHANGES = {"training", "gradient_checkpointing", "is_gradient_checkpointing", "name_or_path", "warnings_issued"}
_CHANGES |= {"hf_device_map", "max_seq_len_cached"}  # as a model is run, or with the place where it runs
_PROBES = ["A quick brown fox.", "Ein süßer Käse, 1,024 €", "\u4f60\u597d, def f(x): return x ** 2\n"]


@dataclass(frozen=True, slots=True)
class Job:
    """A pass, what its results are, and what they depend on beside model, tokenizer and texts."""

    run: Pass
    kind: Texts | Vectors
    settings: Mapping[str, Any]

    def as_they_come(self, skip: Collection[int]) -> Iterator[tuple[int, Any]]:
        """(index, result), longest texts first."""
        self.run.prepare()
        for indices, results in self.run.results(self._without(skip), shown=self.run.progress):
            yield from zip(indices, results, strict=True)

    def whole(self, output: str | Path | None, world: World | None) -> Any:
        """All results in input order, from ``output`` where it is finished already.

        Raises:
            ConfigError: several ranks without an output; ranks with different jobs.
            StateError: what is there is of another job, or damaged.
        """
        world = world if world is not None else current_world(timeout_s=_PATIENCE_S)
        shown = self.run.progress and world.rank == 0
        if output is None:
            if world.size > 1:
                raise ConfigError("on several ranks `output` must name a file that all of them can reach")
            self.run.prepare()
            return self.kind.gather(len(self.run.texts), self.run.results(self._without(()), shown=shown))
        identity = identity_of(self.run.model, self.run.tokenizer, self.run.texts, self.settings)
        out = Output(Path(output), identity, len(self.run.texts), self.kind)
        _same_job_everywhere(identity, world)
        if not _on_all(world, out.is_finished):
            self.run.prepare()
            with closing(out.journal):
                self._finish(out, world, shown)
        if world.rank == 0:
            out.journal.remove()  # also of a run that was killed just before it did
        return out.read()

    # Ranks that share a job meet when all hold their journals, when each knows what was finished before (then any may add to
    # it), when all have finished (then one writes the output), when the output is there. An error before any of them is raised
    # on every rank. Each sample is in one rank's share, so in one journal; which rank that was does not matter to the next run.
    # Journals are held until the output is there, so that another process either is refused, or finds all of it.
    def _finish(self, out: Output, world: World, shown: bool) -> None:
        _on_all(world, lambda: out.journal.open(world.rank))
        if _on_all(world, out.is_finished):  # by another process, meanwhile
            return
        finished: dict[int, Any] = {}
        _on_all(world, lambda: finished.update(out.journal.finished()))
        for indices, results in self.run.results(self._without(finished), world.rank, world.size, shown):
            out.journal.append(indices, results)
        world.all_max([0])
        _on_all(world, out.publish if world.rank == 0 else lambda: None)

    def _without(self, done: Collection[int]) -> list[int]:
        left_out = set(done)
        return [i for i in range(len(self.run.texts)) if i not in left_out]


def _on_all(world: World, act: Callable[[], bool | None]) -> bool:
    """Whether ``act`` is true on any rank; an error on one rank ends it on every rank. A barrier."""
    found, error = False, None
    try:
        found = bool(act())
    except Exception as caught:  # raised again, when all ranks know
        error = caught
    failed, anywhere = world.all_max([world.rank if error is not None else -1, int(found)])
    if error is not None:
        raise error
    if failed >= 0:
        raise ConfigError(f"rank {failed} of {world.size} could not go on with the job; see its error")
    return bool(anywhere)


def _same_job_everywhere(identity: Mapping[str, Any], world: World) -> None:
    numbers = [int(hashed(repr(value), 12), 16) for value in identity.values()]
    highest, lowest = world.all_max(numbers), [-n for n in world.all_max([-n for n in numbers])]
    differing = [name for name, a, b in zip(identity, highest, lowest, strict=True) if a != b]
    if differing:
        raise ConfigError(f"ranks were given different jobs: {', '.join(differing)} differ; give all ranks the same")


def identity_of(
    model: Any, tokenizer: Any, texts: Iterable[str], settings: Mapping[str, Any]
) -> dict[str, str | int | None]:
    """Everything that results depend on, as JSON: texts, weights, configurations, tokenizer, arguments.

    Equal in every process, wherever the model was loaded from; two jobs that differ in anything named here differ.
    Cost: weights are read once (a few seconds for billions of parameters), texts too.
    """
    texts = list(texts)
    return {
        "model": f"{type(model).__name__} {_weights(model)}",
        "model's switches": _switches(model),
        "model's config": _config(getattr(model, "config", None)),
        "model's generation_config": _config(getattr(model, "generation_config", None)),
        "tokenizer": _tokenizer(tokenizer),
        "texts": _texts(texts),
        **{name: _setting(value) for name, value in settings.items()},
    }


def _setting(value: Any) -> str | int | None:
    if value is None or type(value) in (int, str):
        return value
    if isinstance(value, Mapping):
        return described({name: _said(part) for name, part in value.items()})
    return described(value)


def _said(config: Any) -> Any:
    """A configuration as what it says; anything else as it is."""
    if not hasattr(config, "to_dict"):
        return config
    said = {name: part for name, part in config.to_dict().items() if part is not None}
    return {name: part for name, part in said.items() if name not in _WHERE_FROM | _HOW}


def _config(config: Any) -> str | None:
    return None if config is None else hashed(described(_said(config)))


def _texts(texts: list[str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)  # its length first: "ab", "c" is not "a", "bc"
    return f"{len(texts)} texts #{digest.hexdigest()}"


def _tokenizer(tokenizer: Any) -> str:
    """Its rules or at least its vocabulary, its special tokens, and what it makes of some words."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(
        backend, "to_str"
    ):  # of a fast tokenizer; truncation and padding are left there by each call
        rules: Any = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
    else:
        rules = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, "get_vocab") else None
    special = [getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id", "truncation_side")]
    return f"{type(tokenizer).__name__} #{hashed(repr((rules, special, tokenizer(_PROBES)['input_ids'])))}"


# What weights do not say: which adapter is active, whether it is switched off or merged, its scaling, a temperature. Such
# settings are plain values of modules. A private one belongs to the framework, except in the layers of peft.
def _switches(model: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, module in model.named_modules():
        private = type(module).__module__.partition(".")[0] == "peft"
        for key, value in sorted(vars(module).items()):
            if key not in _CHANGES and (private or not key.startswith("_")) and _is_plain(value):
                digest.update(f"{name}.{key}={value!r};".encode())
    return f"#{digest.hexdigest()}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, str)


# Weights are compared by checksums, since they may be many and on a device. A checksum after Fletcher: elements read as
# integers are summed, and summed once more times their odd places, modulo 2**64. A changed element changes the first sum,
# elements that change places the second. Reads everything once, widens at most 2**24 elements at a time.
def _weights(model: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        if hasattr(tensor, "element_size"):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {list(_checksums(tensor))};".encode())
    return f"#{digest.hexdigest()}"


def _checksums(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    import torch

    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for part in tensor.detach().reshape(-1).view(kinds[tensor.element_size()]).split(_AT_ONCE):
        wide = part.to(torch.int64)
        places = torch.arange(1, 2 * len(wide), 2, device=wide.device)
        yield int(wide.sum()), int((wide * places).sum())

"""A job: one pass over a dataset whose results are given back as a whole, also after crashes, also on many ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dynagroup.distributed import World, current_world
from dynagroup.errors import ConfigError
from dynagroup.fingerprint import hashed
from dynagroup.oom.identity import identity_of
from dynagroup.oom.inference import Pass
from dynagroup.oom.output import Output
from dynagroup.oom.results import Kind

__all__ = ["Job"]

T = TypeVar("T")

_PATIENCE_S = 30 * 24 * 3600.0
"""Ranks wait so long for each other's batches. One that has died is noticed at once: its connections close."""


@dataclass(frozen=True, slots=True)
class Job:
    """A pass, what its results are, and what they depend on beside model, tokenizer and texts."""

    run: Pass
    kind: Kind
    settings: Mapping[str, Any]
    progress: bool

    def as_they_come(self, skip: Collection[int]) -> Iterator[tuple[int, Any]]:
        """(index, result), longest texts first."""
        self.run.prepare()
        done = set(skip)
        samples = [i for i in range(len(self.run.texts)) if i not in done]
        for indices, results in self.run.results(samples, shown=self.progress):
            yield from zip(indices, results, strict=True)

    def whole(self, output: str | Path | None, world: World | None) -> Any:
        """All results in input order, from ``output`` where it is finished already.

        Raises:
            ConfigError: several ranks without an output; ranks with different jobs.
            StateError: what is there is of another job, or damaged.
        """
        world = world if world is not None else current_world(timeout_s=_PATIENCE_S)
        num_texts, shown = len(self.run.texts), self.progress and world.rank == 0
        if output is None:
            if world.size > 1:
                raise ConfigError("on several ranks `output` must name a file that all of them can reach")
            self.run.prepare()
            return self.kind.gather(num_texts, self.run.results(range(num_texts), shown=shown))
        identity = identity_of(self.run.model, self.run.tokenizer, self.run.texts, self.settings)
        out = Output(Path(output), identity, num_texts, self.kind)
        _same_job_everywhere(identity, world)
        if not world.all_max([int(_on_all(world, out.is_finished))])[0]:
            self._finish(out, world, shown)
        elif world.rank == 0:
            out.journal.remove()  # a run may have been killed just before it did
        return out.read()

    # Ranks that share a job meet three times: when each knows what was finished before (then any may add to it), when all have
    # finished (then one writes the output), when the output is there. An error before any of them is raised on every rank. Each
    # sample is in one rank's share, so in one journal; which rank that was does not matter to the next run.
    def _finish(self, out: Output, world: World, shown: bool) -> None:
        finished = _on_all(world, out.journal.finished)
        self.run.prepare()
        _on_all(world, lambda: out.journal.open(world.rank))
        samples = [i for i in range(len(self.run.texts)) if i not in finished]
        with closing(out.journal):
            for indices, results in self.run.results(samples, world.rank, world.size, shown):
                out.journal.append(indices, results)
        world.all_max([0])
        _on_all(world, out.publish if world.rank == 0 else lambda: None)


def _on_all(world: World, act: Callable[[], T]) -> T:
    """What ``act`` gives on this rank; an error on one rank ends it on every rank. A barrier."""
    value, error = None, None
    try:
        value = act()
    except Exception as caught:  # raised again, when all ranks know
        error = caught
    failed = world.all_max([world.rank if error is not None else -1])[0]
    if error is not None:
        raise error
    if failed >= 0:
        raise ConfigError(f"rank {failed} of {world.size} could not go on with the job; see its error")
    return value  # type: ignore[return-value]


def _same_job_everywhere(identity: Mapping[str, Any], world: World) -> None:
    numbers = [int(hashed(repr(value), 12), 16) for value in identity.values()]
    highest, lowest = world.all_max(numbers), [-n for n in world.all_max([-n for n in numbers])]
    differing = [name for name, a, b in zip(identity, highest, lowest, strict=True) if a != b]
    if differing:
        raise ConfigError(f"ranks were given different jobs: {', '.join(differing)} differ; give all ranks the same")

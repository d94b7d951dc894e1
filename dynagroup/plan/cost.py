"""Work: how long a batch will take, predicted in linear tokens. It cuts windows and matches ranks; it never decides what fits.

A *linear token* is the time of one token in the matrix products of a layer. Attention adds to it in proportion to the
length of the sample, and every step costs something before its first token.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynagroup.budget.base import Budget, padded_streams
from dynagroup.errors import ConfigError
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.shapes import Streams, round_up
from dynagroup.validation import check_number

CPU_PER_STEP = 128.0
"""Linear tokens that a step costs on a CPU, which has no kernels to launch: the best of those measured,
``benchmarks/results/objective.json``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Predicted time of a batch: ``per_step + n * (L + L**2 / crossover)``, packed ``per_step + sum(l + l**2 / crossover)``.

    With several padded streams (an encoder's and a decoder's) each adds its own ``n * (L + L**2 / crossover)``.

    Args:
        per_step: linear tokens that a step costs however small its batch is: launching kernels, reducing gradients.
        crossover: tokens at which a sample's attention costs as much as everything else; ``math.inf``: attention is free.

    >>> Work(per_step=100, crossover=1000).of_lengths([10, 1000]).tolist()
    [10.1, 2000.0]
    """

    per_step: float = 1024.0
    crossover: float = 12_288.0

    def __post_init__(self) -> None:
        check_number("per_step", self.per_step, or_zero=True)
        check_number("crossover", self.crossover, finite=False)

    @classmethod
    def of(cls, model_or_config: Any, *, device: Any = "cuda") -> Work:
        """What a ``transformers`` model's config says; measured step times say it better, see :meth:`fit`.

        A token takes 2 operations for each weight of a layer's matrices and of the output matrix; attention takes ``4 * heads *
        head size`` for each token that a token looks at. Their ratio is the crossover. The price is arithmetic, see the docs.

        Args:
            model_or_config: a model, or its config.
            device: where it runs, a ``torch.device`` or its name.
        """
        from dynagroup.memory.trace.model import architecture

        sizes = architecture(getattr(model_or_config, "config", model_or_config))
        missing = [name for name in ("hidden_size", "num_layers", "num_heads", "head_size") if not sizes[name]]
        if missing:
            said = f"the config of {type(model_or_config).__name__} does not state {', '.join(missing)}"
            raise ConfigError(f"{said}; write Work(per_step=..., crossover=6 * hidden size), or measure it: Work.fit")
        hidden, layers = sizes["hidden_size"], sizes["num_layers"] + sizes["num_encoder_layers"]
        attention = sizes["num_heads"] * sizes["head_size"]
        matrices = 2 * attention + 2 * sizes["num_kv_heads"] * sizes["head_size"]
        matrices += (3 if sizes["gated_mlp"] else 2) * sizes["intermediate_size"] * sizes["experts_per_token"]
        linear = 2.0 * hidden * (matrices + sizes["vocabulary_size"] / layers)
        # launching a layer's kernels takes as long as 3e10 operations; moving weights and gradients as long as 256 tokens
        per_step = CPU_PER_STEP if str(device).startswith("cpu") else float(np.clip(3e10 / linear, 256, 2048))
        return cls(per_step=per_step, crossover=linear / (4.0 * attention))

    @classmethod
    def of_known(cls, model: Any, *, device: Any) -> Work:
        """As :meth:`of`; of a model that is none of ``transformers``, or does not state its sizes, the default for the device.

        >>> Work.of_known(object(), device="cpu").per_step == CPU_PER_STEP
        True
        """
        module, config = sys.modules.get("transformers"), getattr(model, "config", None)  # its holder has imported it
        try:
            if module is not None and isinstance(config, module.PretrainedConfig):
                return cls.of(config, device=device)
        except ConfigError:
            pass
        return cls(per_step=CPU_PER_STEP) if str(device).startswith("cpu") else cls()

    @classmethod
    def fit(cls, rows: Iterable[tuple[int, int, float]]) -> Work:
        """From measured padded steps: (samples, tokens of the longest, seconds) each.

        Least squares of relative errors of ``seconds = a + b * n * L + c * n * L**2``; what comes out below zero is left out.
        ConfigError: fewer than three different shapes, or a number that is not positive.

        >>> work = Work(per_step=500, crossover=4000)
        >>> shapes = [(1, 100), (8, 100), (8, 1000), (2, 4000)]
        >>> fitted = Work.fit([(n, longest, 1e-5 * (500 + n * work.of_lengths(longest))) for n, longest in shapes])
        >>> round(fitted.per_step), round(fitted.crossover)
        (500, 4000)
        """
        table = np.asarray([tuple(row) for row in rows], np.float64).reshape(-1, 3)
        if len(np.unique(table[:, :2], axis=0)) < 3 or not (np.isfinite(table).all() and (table > 0).all()):
            given = f"{len(table)} rows of {len(np.unique(table[:, :2], axis=0))} shapes"
            raise ConfigError(
                f"`rows` must be greater than 0, of at least three different shapes, but was given {given}"
            )
        tokens = table[:, 0] * table[:, 1]
        columns = np.stack([np.ones(len(table)), tokens, tokens * table[:, 1]], axis=1) / table[:, 2:]
        products, targets = columns.T @ columns, columns.sum(axis=0)
        scale = np.sqrt(np.diag(products))
        scaled, wanted = products / np.outer(scale, scale), targets / scale
        found = np.zeros(3)
        for used in ([0, 1, 2], [0, 1], [1, 2], [1]):  # the last is a ratio of sums of positive numbers
            found = np.zeros(3)
            found[used] = np.linalg.lstsq(scaled[np.ix_(used, used)], wanted[used], rcond=None)[0] / scale[used]
            if (found >= 0).all() and found[1] > 0:
                break
        start, linear, squared = (float(value) for value in found)
        return cls(per_step=start / linear, crossover=linear / squared if squared else math.inf)

    def of_lengths(self, tokens: ArrayLike | Mapping[str, ArrayLike]) -> NDArray[np.float64]:
        """Work of samples of these lengths, without the price of a step: linear tokens, float64 (N,); streams add up."""
        if isinstance(tokens, Mapping):
            return np.sum([self.of_lengths(values) for values in tokens.values()], axis=0)
        linear = np.asarray(tokens, np.float64)
        return linear + linear * linear / self.crossover

    def of_batches(self, batches: Batches, lengths: Streams, budget: Budget) -> NDArray[np.float64]:
        """Work of every batch, without the price of a step; ``lengths`` are indexed by what ``batches`` hold."""
        padded = {name: lengths[name] for name in padded_streams(budget, lengths)}
        if budget.layout == "packed" and len(batches):
            each = self.of_lengths({name: values[batches.order] for name, values in padded.items()})
            return np.add.reduceat(each, batches.offsets[:-1])
        longest = shapes_of(batches, padded).longest.items()
        return batches.sizes * self.of_lengths({n: round_up(value, budget.pad_to_multiple_of) for n, value in longest})

    def of_rows(self, work: NDArray[np.float64]) -> float:
        """Predicted time of steps: each costs its price and the most work of a rank. ``work``: float64 (steps, ranks)."""
        return float(self.per_step * len(work) + work.max(axis=1, initial=0.0).sum())


DEFAULT_WORK = Work()


def check_work(work: Work | None) -> Work:
    """``work``, or the default where there is none. Raises ConfigError where it is something else."""
    if work is not None and not isinstance(work, Work):
        raise ConfigError(f"`work` must be a Work, such as Work.of(model), but is {work!r}")
    return work or DEFAULT_WORK

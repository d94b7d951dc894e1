"""Embeds, classifies or generates with Ray Data: a class for ``Dataset.map_batches``."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from dynagroup.budget.learning import LearningBudget
from dynagroup.distributed import SingleProcess
from dynagroup.errors import ConfigError
from dynagroup.jobs import classify_dataset, embed_dataset, generate_dataset
from dynagroup.validation import check_choice

# task -> (function that runs it, name of the new column)
TASKS: dict[str, tuple[Callable[..., Any], str]] = {
    "embed": (embed_dataset, "embedding"),
    "classify": (classify_dataset, "logits"),
    "generate": (generate_dataset, "generated_text"),
}


class Predictor:
    """Runs a model in Ray actors on one block of rows after another. Each block is sorted by length and run in batches
    that fit. A batch that runs out of memory is run in parts. Rows keep their order and columns, and get a new one.

    Args:
        load: function that returns (model, tokenizer), with the model on its device; called once in each actor.
        task: "embed": new column ``embedding``, float32 (num_rows, features). "classify": ``logits``, float32
            (num_rows, classes). "generate": ``generated_text``, one text per row.
        column: name of the column of texts, or of token ids.
        options: arguments of ``embed_dataset``, ``classify_dataset`` or ``generate_dataset``, such as ``budget``, ``pooling``.

    Raises ConfigError if a block is no dict of arrays, or has no ``column``; BudgetError if a row does not fit alone.

    ```python
    arguments = {"load": load, "task": "embed", "batch_size": 64}
    rows = rows.map_batches(Predictor, fn_constructor_kwargs=arguments, batch_size=4096, concurrency=2, num_gpus=1)
    ```
    """

    def __init__(
        self,
        load: Callable[[], tuple[Any, Any]],
        task: Literal["embed", "classify", "generate"] = "embed",
        *,
        column: str = "text",
        **options: Any,
    ) -> None:
        check_choice("task", task, tuple(TASKS))
        self._run, self._new_column = TASKS[task]
        self.model, self.tokenizer = load()
        self.column = column
        options.setdefault("learned", LearningBudget())
        options.update(progress=False, world=SingleProcess())
        self._options = options

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, object]:
        if not isinstance(batch, dict) or self.column not in batch:
            raise ConfigError(
                f"a block must be a dict of arrays with {self.column!r}, as from batch_format='numpy', "
                f"but is {batch!r:.200}"
            )
        rows = list(batch[self.column])
        tokenizer = self.tokenizer
        if rows and not isinstance(rows[0], str):
            tokenizer = _Ids(rows, tokenizer)
            rows = [str(number) for number in range(len(rows))]
        results = self._run(self.model, tokenizer, rows, **self._options)
        return {**batch, self._new_column: results}


class _Ids:
    """A tokenizer for rows of token ids, which are given by their number as text; pads and decodes as usual."""

    def __init__(self, rows: Sequence[object], tokenizer: Any) -> None:
        self._rows = [np.asarray(row).tolist() for row in rows]
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(
        self, numbers: Sequence[str], *, max_length: int | None = None, **_: object
    ) -> dict[str, list[list[int]]]:
        ids = [self._rows[int(number)][:max_length] for number in numbers]
        return {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}

"""Generates for every text of a dataset."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.jobs.formats import JSON_LINES
from dynagroup.jobs.run import Job, all_results, results_as_they_come
from dynagroup.jobs.texts import Batch, Encoded, JobOptions, Task, TokenizedJob
from dynagroup.oom.generate import check_options, generation_option, is_data, num_copies
from dynagroup.validation import check_int

_NEW_TOKENS = 128


def generate_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    output: str | Path | None = None,
    max_new_tokens: int | None = None,
    world: World | None = None,
    **options: Any,
) -> list[Any]:
    """Generates for every text, like a loop over ``model.generate``, but in fewer and fuller batches, longest first.

    Results do not contain the prompts, and are in input order; with ``num_return_sequences`` above 1 each is a list. A
    batch that does not fit is split. Under ``torchrun`` ranks share the texts, and every rank returns all results.

    Args:
        model: a transformers model that generates, already on its device.
        output: path of a ``.jsonl`` file to write, one row per text in input order; required on several ranks. Finished
            samples are saved beside it: after a crash the same call runs the rest. A complete file is only read.
        max_new_tokens: int, most tokens generated per text. None: the generation config's, else 128.
        world: ranks that share the work. None: all of ``torch.distributed``.
        options: ``batch_size`` (default 16: this many of the longest texts fit the device) or ``budget``;
            ``max_length`` (tokens to which texts are truncated, without new ones, unlike in ``generate``); ``progress``
            (default True: a bar on a terminal); ``learned`` (a :class:`~dynagroup.LearningBudget`);
            ``attention_backends`` (kernels that attention may use, as in
            :class:`~dynagroup.integrations.hf.DynagroupConfig`); ``identity`` (a text or another value for JSON,
            compared with that of earlier results in ``output``); ``load`` (False: results stay in ``output``, and None
            is returned); what ``generate`` takes for all samples.

    Raises ConfigError if arguments contradict each other, or a text has more tokens than the model has positions;
    StateError if ``output`` or its journal is damaged or was made with other arguments; BudgetError if a text does not
    fit even alone (the message names it).

    >>> answers = generate_dataset(model, tokenizer, texts, max_new_tokens=64, output="answers.jsonl")  # doctest: +SKIP
    """
    job = _generation(model, tokenizer, texts, max_new_tokens, options)
    return all_results(job, output, world)


def iter_generate(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    max_new_tokens: int | None = None,
    skip: Collection[int] = (),
    **options: Any,
) -> Iterator[tuple[int, Any]]:
    """Yields (index, result) like :func:`generate_dataset`, longest first, except texts in ``skip``; saves nothing."""
    job = _generation(model, tokenizer, texts, max_new_tokens, options)
    return results_as_they_come(job, skip)


def _generation(
    model: Any,
    tokenizer: Any,
    texts: Any,
    max_new_tokens: int | None,
    options: Mapping[str, Any],
) -> Job:
    """Makes a job that generates texts; ``options`` are those of a job and those of ``generate``."""
    names = {field.name for field in fields(JobOptions)} - {"shapes"}
    job_options = {name: value for name, value in options.items() if name in names}
    arguments = {name: value for name, value in options.items() if name not in names}
    check_options(model, arguments)
    for name, value in arguments.items():
        if is_data(value):
            raise ConfigError(
                f"`{name}` is for one batch, but a job makes many batches; leave it out"
            )
    num_new = _num_new_tokens(model, max_new_tokens, arguments)
    is_causal = not model.config.is_encoder_decoder
    num_answers = generation_option("num_return_sequences", model, arguments) or 1
    passed = _generate_arguments(model, tokenizer, arguments, num_new)

    def run(batch: Batch, encoded: Encoded) -> list[str] | list[list[str]]:
        tokens = model.generate(**batch, **passed)
        if is_causal:  # without the prompt
            tokens = tokens[:, batch["input_ids"].shape[1] :]
        answers = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return answers if num_answers == 1 else _grouped(answers, num_answers)

    task = Task(
        run=run,
        settings={"task": "generate", "max_new_tokens": num_new, "arguments": arguments},
        formats=(JSON_LINES,),
        mode="generate",
        is_cut_to_model=False,
        padding_side="left" if is_causal else "right",
        num_copies=num_copies(model, arguments),
        num_new=num_new,
    )
    return TokenizedJob(model, tokenizer, texts, task, job_options)


def _num_new_tokens(model: Any, max_new_tokens: int | None, arguments: Mapping[str, Any]) -> int:
    if max_new_tokens is None:
        max_new_tokens = generation_option("max_new_tokens", model, arguments)
    if max_new_tokens is None:
        max_new_tokens = _NEW_TOKENS
    return check_int("max_new_tokens", max_new_tokens)


def _grouped(answers: list[str], size: int) -> list[list[str]]:
    starts = range(0, len(answers), size)
    return [answers[start : start + size] for start in starts]


def _generate_arguments(
    model: Any, tokenizer: object, arguments: Mapping[str, Any], num_new: int
) -> dict[str, Any]:
    """Returns what ``model.generate`` gets for each batch."""
    passed = dict(arguments)
    if generation_option("stop_strings", model, arguments):  # `generate` looks for them in texts
        passed["tokenizer"] = tokenizer
    config = arguments.get("generation_config")
    if config is None:
        passed["max_new_tokens"] = num_new
    else:  # `generate` refuses max_new_tokens beside a generation_config
        config = copy.deepcopy(config)
        config.max_new_tokens = num_new
        passed["generation_config"] = config
    return passed

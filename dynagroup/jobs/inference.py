"""Runs a model on a whole dataset (generate, embed, classify, score) in planned batches; a crashed run continues."""

import copy
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.jobs.formats import JSON_LINES, RAGGED, VECTORS
from dynagroup.jobs.run import Job, all_results, results_as_they_come
from dynagroup.jobs.scoring import AnswerTokenizer, Scorer, as_result, with_answers
from dynagroup.jobs.sentences import SentenceJob, is_sentence_transformer
from dynagroup.jobs.texts import JobOptions, Task, TokenizedJob
from dynagroup.oom.generate import check_options, generation_option, is_data, num_copies
from dynagroup.text.measure import by_position, is_pair
from dynagroup.validation import check_choice, check_int

Pooling: TypeAlias = Literal["auto", "mean", "first", "last"]

Batch: TypeAlias = dict[str, torch.Tensor]
Encoded: TypeAlias = Mapping[str, Any]

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
            (default True: a bar on a terminal); ``learned`` (a :class:`~dynagroup.LearningBudget`); ``identity`` (a text
            or another value for JSON, compared with that of earlier results in ``output``); ``load`` (False: results
            stay in ``output``, and None is returned); what ``generate`` takes for all samples.

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


def embed_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[Any],
    *,
    pooling: Pooling | None = "auto",
    normalize: bool = False,
    output: str | Path | None = None,
    world: World | None = None,
    **options: Any,
) -> Any:
    """Returns one vector per text, float32 (num_texts, features): last hidden states, pooled over the tokens.

    Args:
        model: an encoder or a causal model; only the part before its head is run (``model.base_model``). Or a
            ``SentenceTransformer``, which runs all its own modules: the vectors are those of ``model.encode(texts)``.
        tokenizer: the model's; None for a ``SentenceTransformer``.
        texts: sequence of str, or of pairs of str, which the tokenizer joins.
        pooling: "mean" over the text's tokens, or the "first" or "last" token. "auto": "mean", or a
            ``SentenceTransformer``'s own. None: the result is a list with one array (num_tokens, features) per text, of
            all tokens that the tokenizer makes.
        normalize: True scales vectors to length 1.
        output: path of a ``.npy`` file. With ``pooling=None`` it has all tokens of all texts, and the file with the
            ending ``.offsets.npy`` says where each text begins; results are then mapped from the file. Or a ``.parquet``
            file with a list of lists per text. ``output``, ``world`` and errors are as in :func:`generate_dataset`.
        options: as in :func:`generate_dataset`, but texts are truncated to what model and tokenizer accept (logged).
            ``shapes``: int, largest number of shapes (samples, tokens) that a compiled model sees.

    >>> embed_dataset(model, tokenizer, texts, pooling="mean", normalize=True).shape  # doctest: +SKIP
    (1000, 384)
    """
    job = _embedding(model, tokenizer, texts, pooling, normalize, options)
    return all_results(job, output, world)


def iter_embed(
    model: Any,
    tokenizer: Any,
    texts: Sequence[Any],
    *,
    pooling: Pooling | None = "auto",
    normalize: bool = False,
    skip: Collection[int] = (),
    **options: Any,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (index, vector) like :func:`embed_dataset`, longest texts first, without those in ``skip``."""
    job = _embedding(model, tokenizer, texts, pooling, normalize, options)
    return results_as_they_come(job, skip)


def classify_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[Any],
    *,
    per_token: bool = False,
    return_offsets: bool = False,
    output: str | Path | None = None,
    world: World | None = None,
    **options: Any,
) -> Any:
    """Returns a classifier's logits, float32 (num_texts, classes); other arguments are as in :func:`embed_dataset`.

    Args:
        texts: sequence of str, or of pairs of str, such as (query, document) for a cross-encoder.
        per_token: True for a token classifier: the result is a list with one array (num_tokens, classes) per text, of
            all tokens that the tokenizer makes. Files are those of ``embed_dataset(pooling=None)``.
        return_offsets: True, for a token classifier: the result is a list with one list per text. Each entry is a token,
            without special tokens: ``{"label": ..., "score": ..., "start": ..., "end": ...}``, with the characters of
            the text from ``start`` to before ``end``. The output file is then a ``.jsonl`` file.

    >>> entities = classify_dataset(model, tokenizer, texts, return_offsets=True)  # doctest: +SKIP
    >>> entities[0][0]  # doctest: +SKIP
    {'label': 'PER', 'score': 0.98, 'start': 0, 'end': 4}
    """
    job = _classification(model, tokenizer, texts, per_token, return_offsets, options)
    return all_results(job, output, world)


def iter_classify(
    model: Any,
    tokenizer: Any,
    texts: Sequence[Any],
    *,
    per_token: bool = False,
    return_offsets: bool = False,
    skip: Collection[int] = (),
    **options: Any,
) -> Iterator[tuple[int, Any]]:
    """Yields (index, logits) like :func:`classify_dataset`, longest texts first, without those in ``skip``."""
    job = _classification(model, tokenizer, texts, per_token, return_offsets, options)
    return results_as_they_come(job, skip)


def score_dataset(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    answers: Sequence[str] | None = None,
    per_token: bool = False,
    output: str | Path | None = None,
    world: World | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Returns how likely a causal model finds each text, or each answer after its prompt.

    A result is ``{"sum": ..., "mean": ..., "num_tokens": ...}``: the natural logarithms of the probabilities of the scored
    tokens, summed; their mean (None without tokens); and their number. A text's first token has nothing before it and is
    not scored. With answers, tokens are scored from the first one that the prompt alone does not have. The logits of at
    most 256 tokens exist at a time, and memory budgets know this.

    Args:
        model: a causal model of transformers with its head; also a LoRA of ``peft`` on one.
        texts: the texts, or the prompts of ``answers``.
        answers: sequence of str, one per prompt; the model reads ``prompt + answer``. None: the texts are scored.
        per_token: True adds ``"tokens"``, the logarithm of each scored token's probability.
        output: path of a ``.jsonl`` file. ``output``, ``world``, ``options`` and errors are as in
            :func:`generate_dataset`; texts are truncated only to your ``max_length``.

    >>> scores = score_dataset(model, tokenizer, prompts, answers=answers)  # doctest: +SKIP
    >>> [round(score["sum"], 2) for score in scores]  # doctest: +SKIP
    [-12.03, -7.21]
    """
    job = _scoring(model, tokenizer, texts, answers, per_token, options)
    return all_results(job, output, world)


def iter_score(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    answers: Sequence[str] | None = None,
    per_token: bool = False,
    skip: Collection[int] = (),
    **options: Any,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (index, score) like :func:`score_dataset`, longest texts first, without those in ``skip``."""
    job = _scoring(model, tokenizer, texts, answers, per_token, options)
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
    if max_new_tokens is None:
        max_new_tokens = generation_option("max_new_tokens", model, arguments)
    num_new = check_int("max_new_tokens", _NEW_TOKENS if max_new_tokens is None else max_new_tokens)
    is_causal = not model.config.is_encoder_decoder
    num_answers = generation_option("num_return_sequences", model, arguments) or 1
    passed = _generate_arguments(model, tokenizer, arguments, num_new)

    def run(batch: Batch, encoded: Encoded) -> list[Any]:
        tokens = model.generate(**batch, **passed)
        if is_causal:  # without the prompt
            tokens = tokens[:, batch["input_ids"].shape[1] :]
        answers = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        if num_answers == 1:
            return answers
        starts = range(0, len(answers), num_answers)
        return [answers[start : start + num_answers] for start in starts]

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
    return TokenizedJob(model, tokenizer, texts, task, JobOptions(**job_options)).job()


def _generate_arguments(
    model: Any, tokenizer: Any, arguments: Mapping[str, Any], num_new: int
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


def _embedding(
    model: Any,
    tokenizer: Any,
    texts: Any,
    pooling: Pooling | None,
    normalize: bool,
    options: Mapping[str, Any],
) -> Job:
    per_token = pooling is None
    if is_sentence_transformer(model):
        if pooling not in ("auto", None) or tokenizer is not None:
            raise ConfigError(
                "a SentenceTransformer has its own tokenizer and pooling; leave `pooling` out, and pass None as tokenizer"
            )
        if per_token and normalize:
            raise ConfigError(
                "`normalize` is for one vector per text; leave it out with pooling=None"
            )
        return SentenceJob(
            model, texts, JobOptions(**options), normalize=normalize, per_token=per_token
        ).job()
    check_choice("pooling", pooling, ("auto", "mean", "first", "last", None))
    how = "mean" if pooling == "auto" else pooling
    encoder = _without_head(model)
    config = getattr(encoder, "config", None)  # a T5 saved from its encoder has no such config
    is_pair = hasattr(encoder, "encoder") or getattr(config, "is_encoder_decoder", False)
    if is_pair and hasattr(encoder, "decoder"):
        raise ConfigError(
            f"a {type(model).__name__} returns its decoder's hidden states; pass model.get_encoder()"
        )

    def run(batch: Batch, encoded: Encoded) -> Any:
        states = getattr(encoder(**batch), "last_hidden_state", None)
        if states is None:
            raise ConfigError(
                f"the output of {type(encoder).__name__} has no `last_hidden_state`; give the model without its head, "
                "as AutoModel loads it"
            )
        vectors = states if how is None else _pool(states, batch["attention_mask"], how)
        if normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        if how is None:
            return _without_padding(vectors, batch["attention_mask"])
        return vectors.cpu().numpy()

    task = Task(
        run=run,
        settings={"task": f"embed {how}", "normalize": int(normalize)},
        formats=RAGGED if how is None else (VECTORS,),
    )
    return TokenizedJob(encoder, tokenizer, texts, task, JobOptions(**options)).job()


def _classification(
    model: Any,
    tokenizer: Any,
    texts: Any,
    per_token: bool,
    return_offsets: bool,
    options: Mapping[str, Any],
) -> Job:
    by_token = per_token or return_offsets
    num_dimensions = 3 if by_token else 2

    def run(batch: Batch, encoded: Encoded) -> Any:
        logits = getattr(model(**batch), "logits", None)
        if logits is None:
            raise ConfigError(
                f"the output of {type(model).__name__} has no `logits`; give the model with a head for texts or tokens"
            )
        if logits.dim() != num_dimensions:
            raise ConfigError(
                f"{type(model).__name__} returns logits {tuple(logits.shape)} for {len(batch['input_ids'])} texts; "
                "for a classifier of tokens pass per_token=True, for one of texts leave it out"
            )
        if not by_token:
            return logits.float().cpu().numpy()
        tokens = _without_padding(logits, batch["attention_mask"])
        if not return_offsets:
            return tokens
        return _labels(tokens, encoded, model.config.id2label)

    formats: Any = (VECTORS,)
    tokenizer_options: dict[str, Any] = {}
    if return_offsets:
        formats = (JSON_LINES,)
        tokenizer_options = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
    elif per_token:
        formats = RAGGED
    task = Task(
        run=run,
        settings={"task": "classify", "per_token": int(by_token), "offsets": int(return_offsets)},
        formats=formats,
        tokenizer_options=tokenizer_options,
    )
    return TokenizedJob(model, tokenizer, texts, task, JobOptions(**options)).job()


def _scoring(
    model: Any,
    tokenizer: Any,
    prompts: Any,
    answers: Any,
    per_token: bool,
    options: Mapping[str, Any],
) -> Job:
    scorer = Scorer.of(model)
    texts = by_position(prompts)
    if any(map(is_pair, texts)):
        raise ConfigError("`texts` are pairs; pass the second texts as `answers`")
    if answers is not None:
        texts = with_answers(texts, by_position(answers))
        tokenizer = AnswerTokenizer(tokenizer)

    def run(batch: Batch, encoded: Encoded) -> list[dict[str, Any]]:
        starts = encoded.get("num_prompt_tokens", [1] * len(batch["input_ids"]))
        scores = scorer.scores(batch, starts)
        return [as_result(tokens, per_token) for tokens in scores]

    task = Task(
        run=run,
        settings={"task": "score", "per_token": int(per_token)},
        formats=(JSON_LINES,),
        memory=scorer.memory,
        is_cut_to_model=False,
    )
    return TokenizedJob(model, tokenizer, texts, task, JobOptions(**options)).job()


def _labels(
    logits: Sequence[np.ndarray], encoded: Encoded, names: Mapping[int, str]
) -> list[list[dict[str, Any]]]:
    """Returns the label of each token that is not special, with its probability and its place in the text."""
    results = []
    for text, values in enumerate(logits):
        probabilities = torch.from_numpy(values).softmax(dim=1).numpy()
        offsets = encoded["offset_mapping"][text]
        are_special = encoded["special_tokens_mask"][text]
        tokens = []
        for (start, end), is_special, row in zip(offsets, are_special, probabilities, strict=True):
            if not is_special:
                label = int(row.argmax())
                score = float(row[label])
                tokens.append({"label": names[label], "score": score, "start": start, "end": end})
        results.append(tokens)
    return results


def _without_padding(values: torch.Tensor, mask: torch.Tensor) -> list[np.ndarray]:
    """Returns the values of each text's tokens, float32 (num_tokens, features); rows are padded on the right."""
    on_cpu = values.float().cpu().numpy()
    counts = mask.sum(dim=1).tolist()
    return [row[:count].copy() for row, count in zip(on_cpu, counts, strict=True)]


def _without_head(model: Any) -> Any:
    """Returns the part of a model that computes hidden states. Of a peft model these are the layers with the adapters in
    them; an adapter that is around the model (as in prompt tuning) stays."""
    peft = sys.modules.get("peft")  # not imported here: whoever has a peft model has imported peft
    if peft is not None and isinstance(model, peft.PeftModel):
        if model.active_peft_config.is_prompt_learning:
            return model
        model = model.get_base_model()
    return model.base_model if hasattr(model, "base_model_prefix") else model


def _pool(states: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """Pools hidden states (samples, tokens, features) to float32 (samples, features); rows are padded on the right."""
    num_tokens = mask.sum(1).clamp(min=1)
    if pooling == "mean":  # summed in float32, because bfloat16 cannot count beyond 256
        shown = states * mask.unsqueeze(-1).to(states.dtype)
        return shown.sum(1, dtype=torch.float32) / num_tokens.unsqueeze(-1)
    position = torch.zeros_like(num_tokens) if pooling == "first" else num_tokens - 1
    rows = torch.arange(len(states), device=states.device)
    return states[rows, position].float()

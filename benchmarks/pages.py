"""The figures of README and docs, written into the pages from ``benchmarks/results``: ``python scripts/bench.py pages``.

A page says ``<!-- figures: NAME -->`` and ``<!-- end -->``; what stands between them is the table of that name in ``tables.md``
or the sentence below.
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import cache, reduce
from importlib import import_module
from io import StringIO
from operator import getitem
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.record import RESULTS, rows_of, table

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"<!-- figures: (\w+) -->.*?<!-- end -->", re.S)
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
Figures = Mapping[str, Any]
Row = dict[str, Any]
TO_RECORD = "To be recorded again."
"""What stands where a file of results is missing."""


def read(result: str, *path: str) -> Any:
    """The figures of a file of results, or those under a path; the demo, which writes its own, has no head beside them."""
    found = json.loads((RESULTS / f"{result}.json").read_text(encoding="utf-8"))
    return reduce(getitem, path, found.get("figures", found))


def few_shapes(found: Figures) -> list[Row]:
    """A row a length file: of updates and of a window, figures by the number of shapes."""
    rows: dict[str, Row] = {}
    for case, one in found.items():
        name, mode, number, *_ = re.split(", | shapes", case)
        row = rows.setdefault(name, {"key": name, "cv": one["cv"], "updates": {}, "window": {}})
        row["window" if mode == "a window" else "updates"][int(number)] = one
    return sorted(rows.values(), key=lambda row: row["cv"])


def rivals(same: bool) -> Callable[[Figures], list[str]]:
    """A method a row, a set of lengths a column: speed over fixed batches, padding, and a rival's setting.

    Samples a second where all have the same updates; else real tokens.
    """

    def cell(methods: Figures, name: str) -> str:
        run = methods[name]
        fixed = methods["fixed"]
        if same:
            speed = run["samples_per_s"]["median"] / fixed["samples_per_s"]["median"]
        else:
            speed = run["real_tokens_per_s"] / fixed["real_tokens_per_s"]
        settings = map(str, run["setting"].values())
        return ", ".join([f"{speed:.2f}x", f"{run['padding']:.0%}", *settings])

    def lines(found: Figures) -> list[str]:
        runs = [one["methods"] for one in found.values()]
        names = [name for name, one in runs[0].items() if one["same_updates"] == same]
        rows = (" | ".join([name, *(cell(methods, name) for methods in runs)]) for name in names)
        head = " | ".join(["speed over fixed, padding, setting", *found])
        return [f"| {head} |", "|---" * (len(runs) + 1) + "|", *(f"| {row} |" for row in rows)]

    return lines


def small_updates(found: Figures) -> list[str]:
    """A method a row, a set of lengths a column: real tokens a second over fixed batches', by size of the updates."""
    speeds: dict[str, dict[str, list[str]]] = {}
    for name, one in found.items():
        lengths = name.partition(", ")[0]
        fixed = one["methods"]["fixed"]["real_tokens_per_s"]
        for method, run in one["methods"].items():
            cells = speeds.setdefault(method, {}).setdefault(lengths, [])
            cells.append(f"{run['real_tokens_per_s'] / fixed:.2f}x")
    columns = next(iter(speeds.values()))
    head = " | ".join(["speed over fixed in updates of 8, of 32", *columns])
    lines = [f"| {head} |", "|---" * (len(columns) + 1) + "|"]
    for method, cells in speeds.items():
        row = " | ".join([method, *map(", ".join, cells.values())])
        lines.append(f"| {row} |")
    return lines


def rivals_best(found: Figures) -> str:
    """Ours over the best rival that keeps the updates: the least and the most of all sets."""
    padded = []
    packed = []
    for one in found.values():
        speeds = {
            name: run["samples_per_s"]["median"]
            for name, run in one["methods"].items()
            if run["same_updates"]
        }
        best = max(speed for name, speed in speeds.items() if not name.startswith("dynagroup"))
        padded.append(speeds["dynagroup"] / best)
        packed.append(speeds["dynagroup, packed"] / best)
    return (
        f"{min(padded):.2f} to {max(padded):.2f} on the {len(found)} sets; "
        f"with packed batches {min(packed):.2f} to {max(packed):.2f}"
    )


def packed_rivals(found: Figures) -> str:
    """Packed batches over padding-free ones, and what a token takes in the smallest, the best and the largest batch."""
    speeds = {name: one["speed"]["median"] for name, one in found["sets"].items()}
    slower = [f"{name} {speed:.2f}" for name, speed in speeds.items() if speed < 0.995]
    costs = {int(tokens): one["median"] for tokens, one in found["us_a_token"].items()}
    sizes = [min(costs), min(costs, key=costs.__getitem__), max(costs)]
    tokens = [f"{costs[size]:.0f} microseconds in a batch of {size:,}" for size in sizes]
    return (
        f"{min(speeds.values()):.2f} to {max(speeds.values()):.2f} on {len(speeds)} sets "
        f"(below 1: {', '.join(slower) or 'none'}). A token takes {', '.join(tokens)}"
    )


def quality(found: Figures) -> list[Row]:
    rows = []
    for name, case in found.items():
        for way, figures in case["found"].items():
            fields = {key: figures.get(key, []) for key in ("held_out_loss", "accuracy")}
            rows.append({"key": name, "way": way, **fields, "padding": figures["padding"]})
    return rows


def quality_of_all(found: Figures) -> str:
    """The loss of stratified updates minus that of fixed ones, over all cases."""
    differences = {}
    for name, case in found["cases"].items():
        losses = {way: mean(one["held_out_loss"]) for way, one in case["found"].items()}
        differences[name] = losses["grouping 50"] - losses["fixed"]
    most = max(differences, key=differences.__getitem__)
    others = [difference for name, difference in differences.items() if name != most]
    return (
        f"{min(others):+.3f} to {max(others):+.3f} in {len(others)} of {len(differences)} cases, "
        f"and {differences[most]:+.3f} in one ({most})"
    )


def recipe_speed(found: Figures) -> str:
    """README's first recipe beside the plain Trainer."""
    plain, ours = found["ways"]["plain"], found["ways"]["README"]
    speed = sum(plain["seconds"]) / sum(ours["seconds"])
    losses = [
        f"{min(one['held_out_loss']):.3f} to {max(one['held_out_loss']):.3f}"
        for one in (ours, plain)
    ]
    return f"{speed:.2f} times as fast; held-out loss {losses[0]}, plain {losses[1]}"


def recovery(update: Figures) -> str:
    work = read("oom_work")
    ratios = [one["ratio"]["median"] for one in update["updates"].values()]
    return (
        f"of {work['planned_batches']} planned batches of texts, "
        f"{work['batches_that_do_not_fit']:.0%} did not fit. "
        f"Memory ran out {work['learned']['failures']} time, and the run needed "
        f"{work['ratio']['forward_passes']:.2f} times the forward passes of a run that knew the limit. "
        f"A training update that can be repeated took {min(ratios):.2f} to {max(ratios):.2f} times as long"
    )


def growth(found: Figures) -> str:
    """The exponents of what grows with samples, and of what grows with ranks."""
    of_samples = []
    of_ranks = []
    for name, one in found.items():
        exponents = of_ranks if "ranks" in name else of_samples
        exponents.append(one["exponent"])
    return (
        f"{min(of_samples):.2f} to {max(of_samples):.2f} with the number of samples, "
        f"{max(of_ranks):.2f} with the number of ranks"
    )


def ablation(found: Figures) -> str:
    """What switching off a mechanism of planning costs on the file where it costs most."""
    costs = sorted(found["planning"].items(), key=lambda item: item[1]["most"], reverse=True)
    return ". ".join(f"{name.capitalize()}: {one['most']:+.0%}" for name, one in costs)


def faults(found: Figures) -> str:
    """Of the kinds of faults that the campaign has today."""
    kinds = import_module("benchmarks.faults.__main__").FAULTS
    counts = [count for name, count in found["by_fault"].items() if name in kinds]
    findings = f"{len(found['findings'])} findings" if found["findings"] else "nothing found"
    return f"{sum(counts):,} cases, {len(counts)} kinds of faults, {findings}"


DOCTOR = (
    "doctor benchmarks/lengths/azure_llm_conv_2023.npz --column tokens --max-length 4k "
    "--batch-size 8 --world-size 4 --device cuda"
)


def doctor() -> list[str]:
    """What the example of docs/command-line.md prints."""
    from dynagroup.cli import main

    with redirect_stdout(StringIO()) as printed:
        main(
            [
                str(ROOT / word) if word.startswith("benchmarks/") else word
                for word in DOCTOR.split()
            ]
        )
    return ["```text", f"$ dynagroup {DOCTOR}", *printed.getvalue().splitlines(), "```"]


def gpu_train(found: Figures) -> list[Row]:
    """A way to form batches a row: real tokens a second of each of its turns, batches an update, padding."""
    rows: dict[str, Row] = {}
    for one in found["train"]:
        key = f"{one['way']}{', with cuDNN' * one['cudnn']}"
        row = rows.setdefault(key, {"key": key, "rates": [], "batches": [], "padding": []})
        row["rates"].append(f"{one['real_tokens'] / one['seconds']:,.0f}")
        row["batches"].append(one["batches_per_update"])
        row["padding"].append(one["padding"])
    return list(rows.values())


def gpu_shapes(found: Figures) -> str:
    new, again = ([one[key] for one in found["new_shapes"]] for key in ("new_s", "again_s"))
    return f"{new[0]:.2f} s for a new shape, {again[0]:.2f} s when it comes again; without cuDNN {new[1]:.2f} s and {again[1]:.2f} s"  # noqa: E501


def gpu_peaks(found: Figures) -> list[str]:
    return import_module("benchmarks.memory").tabled(found)


ROWS = {
    "few_shapes": few_shapes,
    "quality": quality,
    "gpu_train": gpu_train,
}
"""The rows of tables that are more than the entries of their file."""
WIDE = {
    "rivals_same": rivals(True),
    "rivals_other": rivals(False),
    "rivals_small": small_updates,
    "gpu_memory": gpu_peaks,
    "gpu_fits": gpu_peaks,
}
"""Tables whose columns depend on their file."""
SENTENCES: dict[str, tuple[str, str | Callable[[Any], str]]] = {
    "recipe_speed": ("trainer_recipe", recipe_speed),
    "planning_memory": ("plan_speed", "{token_budget_1m_peak_mb_over_input:.0f} MB"),
    "demo_speed": (
        "demo_cpu",
        "{speedup:.2f} times as many samples a second (quartiles over the updates: "
        "{speedup_quartiles[0]:.2f} to {speedup_quartiles[1]:.2f})",
    ),
    "demo_threads": ("demo_cpu", "{threads}"),
    "rivals_best": ("train_rivals", rivals_best),
    "packed_rivals": ("train_packed", packed_rivals),
    "logits": (
        "logits",
        "{plain[more]:.0%} more tokens, and {checkpointing[more]:.0%} with checkpointing",
    ),
    "recovery": ("oom_update", recovery),
    "trainer": (
        "trainer",
        "a plain Trainer over another (control) {plain_over_plain[ratio][median]:.2f}; dynagroup over plain with equal "
        "batches {equal_batches[ratio][median]:.2f}, with lengths like texts {texts[ratio][median]:.2f}, and over plain with "
        "`batch_rebalance` {texts_batch_rebalance[ratio][median]:.2f}",
    ),
    "growth": ("growth", growth),
    "ablation": ("ablation", ablation),
    "quality_of_all": ("quality", quality_of_all),
    "embed_summary": (
        "embed",
        "{texts} docstrings of CV {cv:.2f}; vectors differ by at most {largest_difference_of_vectors:.0e}",
    ),
    "faults_summary": ("faults", faults),
    "worker_cost": (
        "loader_cost",
        "{us_a_batch[planned][median]:.0f} microseconds a batch; with a plain `DataLoader` and the same batches "
        "{us_a_batch[plain][median]:.0f}",
    ),
    "packing_cost": (
        "loader_cost",
        "arrays {ms_a_packed_batch[dynagroup, arrays][median]:.1f} ms (transformers' own collator "
        "{ms_a_packed_batch[transformers, arrays][median]:.1f}), lists {ms_a_packed_batch[dynagroup, lists][median]:.1f} "
        "({ms_a_packed_batch[transformers, lists][median]:.1f}), lists with masks and labels "
        "{ms_a_packed_batch[dynagroup, lists, masks, labels][median]:.1f} "
        "({ms_a_packed_batch[transformers, lists, masks, labels][median]:.1f})",
    ),
    "gpu_shapes": ("gpu_steps", gpu_shapes),
    "gpu_oom": (
        "gpu_oom",
        "generation was split {generation[num_splits]} time, and {generation[tokens_equal]:.0%} of the tokens were equal. A "
        "forward pass was run in {forward[num_parts]} parts, with a largest difference of {forward[largest_difference]:.0e}. "
        "Training ran out of memory {training[out_of_memory_errors]} time, and parameters differed by "
        "{training[largest_difference]:.0e}",
    ),
}


@cache
def shown() -> dict[str, str]:
    """What stands between marks of each name: a table between empty lines, or a sentence."""
    found = {"doctor": doctor()}
    text = Path(__file__).with_name("tables.md").read_text(encoding="utf-8").strip()
    for about, *lines in (block.split("\n") for block in text.split("\n\n")[1:]):
        name, result, *path = about.replace(":", "").split()
        note = [line[2:] for line in lines if line.startswith("> ")]
        names = dict(line[2:].split(": ", 1) for line in lines if line.startswith("= "))
        try:
            figures = read(result, *path)
            figures = (
                {text: figures[key] for key, text in names.items() if key in figures}
                if names
                else figures
            )
            rows = [] if name in WIDE else ROWS.get(name, rows_of)(figures)
            made = WIDE[name](figures) if name in WIDE else table(rows, *lines[:2])
        except FileNotFoundError:
            made = [TO_RECORD]
        found[name] = [*made, *([""] if note else []), *note]
    made = {name: "\n\n" + "\n".join(lines) + "\n\n" for name, lines in found.items()}
    for name, (result, said) in SENTENCES.items():
        there = (RESULTS / f"{result}.json").exists()
        say = said.format_map if isinstance(said, str) else said
        made[name] = say(read(result)) if there else TO_RECORD
    return {**made, "versions": versions()}


def versions() -> str:
    """Of the frameworks that the tests run with, as pinned for the newest Python."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split(";")[0].strip().split("==") for line in lines if "==" in line)
    frameworks = ("torch", "transformers", "trl", "accelerate", "lightning", "xgboost")
    return ", ".join(f"{name} {pins[name]}" for name in frameworks)


def filled() -> dict[str, str]:
    """The pages with what stands between their marks written anew."""
    figures, pages = shown(), {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    mark = "<!-- figures: {} -->{}<!-- end -->".format
    return {
        name: MARK.sub(lambda found: mark(found[1], figures[found[1]]), page)
        for name, page in pages.items()
    }


def write() -> None:
    """Write the figures, as they are now, into the pages."""
    for name, text in filled().items():
        (ROOT / name).write_text(text, encoding="utf-8")

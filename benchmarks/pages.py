"""The figures of README and docs, written into the pages from ``benchmarks/results``: ``python scripts/bench.py pages``.

A page says ``<!-- figures: NAME -->`` and ``<!-- end -->``; what stands between them is the table of that name in ``tables.md``
or the sentence below.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache, reduce
from importlib import import_module
from io import StringIO
from operator import getitem, itemgetter
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.record import RESULTS, rows_of, table

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"<!-- figures: (\w+) -->.*?<!-- end -->", re.S)
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
Figures = Mapping[str, Any]
Row = dict[str, Any]
FRAMEWORKS = ("torch", "transformers", "trl", "accelerate", "lightning", "xgboost")
TO_RECORD = "To be recorded again."
"""What stands where a file of results is missing."""


def read(result: str, *path: str) -> Any:
    """The figures of a file of results, or those under a path; the demo, which writes its own, has no head beside them."""
    text = (RESULTS / f"{result}.json").read_text(encoding="utf-8")
    content = json.loads(text)
    figures = content.get("figures", content)
    return reduce(getitem, path, figures)


def few_shapes(figures: Figures) -> list[Row]:
    """A row a length file: of updates and of a window, figures by the number of shapes."""
    rows: dict[str, Row] = {}
    for case, times in figures.items():
        name, mode, num_shapes, *_ = re.split(", | shapes", case)
        if name not in rows:
            rows[name] = {"key": name, "cv": times["cv"], "updates": {}, "window": {}}
        column = "window" if mode == "a window" else "updates"
        rows[name][column][int(num_shapes)] = times
    return sorted(rows.values(), key=itemgetter("cv"))


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

    def lines(figures: Figures) -> list[str]:
        runs = [lengths["methods"] for lengths in figures.values()]
        names = [name for name, run in runs[0].items() if run["same_updates"] == same]
        rows = []
        for name in names:
            cells = [cell(methods, name) for methods in runs]
            rows.append([name, *cells])
        return wide_table("speed over fixed, padding, setting", list(figures), rows)

    return lines


def wide_table(corner: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown with a column for each of ``columns``; a row begins with its name."""
    head = " | ".join([corner, *columns])
    rule = "|---" * (len(columns) + 1)
    lines = [f"| {head} |", f"{rule}|"]
    for row in rows:
        cells = " | ".join(row)
        lines.append(f"| {cells} |")
    return lines


def small_updates(figures: Figures) -> list[str]:
    """A method a row, a set of lengths a column: real tokens a second over fixed batches', by size of the updates."""
    speeds: dict[str, dict[str, list[str]]] = {}
    for name, runs in figures.items():
        lengths = name.partition(", ")[0]
        fixed = runs["methods"]["fixed"]["real_tokens_per_s"]
        for method, run in runs["methods"].items():
            of_method = speeds.setdefault(method, {})
            cells = of_method.setdefault(lengths, [])
            speed = run["real_tokens_per_s"] / fixed
            cells.append(f"{speed:.2f}x")
    rows = []
    for method, of_method in speeds.items():
        cells = map(", ".join, of_method.values())
        rows.append([method, *cells])
    columns = list(next(iter(speeds.values())))
    return wide_table("speed over fixed in updates of 8, of 32", columns, rows)


def rivals_best(figures: Figures) -> str:
    """Ours over the best rival that keeps the updates: the least and the most of all sets."""
    padded = []
    packed = []
    for runs in figures.values():
        speeds = {}
        for name, run in runs["methods"].items():
            if run["same_updates"]:
                speeds[name] = run["samples_per_s"]["median"]
        best = max(speed for name, speed in speeds.items() if not name.startswith("dynagroup"))
        padded.append(speeds["dynagroup"] / best)
        packed.append(speeds["dynagroup, packed"] / best)
    return f"{extremes(padded)} on the {len(figures)} sets; with packed batches {extremes(packed)}"


def extremes(values: Collection[float], spec: str = ".2f") -> str:
    """The least and the most."""
    return f"{min(values):{spec}} to {max(values):{spec}}"


def packed_rivals(figures: Figures) -> str:
    """Packed batches over padding-free ones, and what a token takes in the smallest, the best and the largest batch."""
    speeds = {name: run["speed"]["median"] for name, run in figures["sets"].items()}
    slower = [f"{name} {speed:.2f}" for name, speed in speeds.items() if speed < 0.995]
    below_one = ", ".join(slower) if slower else "none"
    costs_us = {int(size): cost["median"] for size, cost in figures["us_a_token"].items()}
    cheapest = min(costs_us, key=costs_us.__getitem__)
    sizes = [min(costs_us), cheapest, max(costs_us)]
    costs = [f"{costs_us[size]:.0f} microseconds in a batch of {size:,}" for size in sizes]
    costs_by_size = ", ".join(costs)
    return (
        f"{extremes(speeds.values())} on {len(speeds)} sets (below 1: {below_one}). "
        f"A token takes {costs_by_size}"
    )


def quality(figures: Figures) -> list[Row]:
    rows = []
    for name, case in figures.items():
        for way, run in case["found"].items():
            row = {"key": name, "way": way, "padding": run["padding"]}
            row["held_out_loss"] = run.get("held_out_loss", [])
            row["accuracy"] = run.get("accuracy", [])
            rows.append(row)
    return rows


def quality_of_all(figures: Figures) -> str:
    """The loss of stratified updates minus that of fixed ones, over all cases."""
    differences = {}
    for name, case in figures["cases"].items():
        losses = {way: mean(run["held_out_loss"]) for way, run in case["found"].items()}
        differences[name] = losses["grouping 50"] - losses["fixed"]
    worst = max(differences, key=differences.__getitem__)
    others = [difference for name, difference in differences.items() if name != worst]
    return (
        f"{extremes(others, '+.3f')} in {len(others)} of {len(differences)} cases, "
        f"and {differences[worst]:+.3f} in one ({worst})"
    )


def recipe_speed(figures: Figures) -> str:
    """README's first recipe beside the plain Trainer."""
    plain = figures["ways"]["plain"]
    ours = figures["ways"]["README"]
    speed = sum(plain["seconds"]) / sum(ours["seconds"])
    our_loss = extremes(ours["held_out_loss"], ".3f")
    plain_loss = extremes(plain["held_out_loss"], ".3f")
    return f"{speed:.2f} times as fast; held-out loss {our_loss}, plain {plain_loss}"


def recovery(update: Figures) -> str:
    work = read("oom_work")
    ratios = [repeated["ratio"]["median"] for repeated in update["updates"].values()]
    num_failures = work["learned"]["failures"]
    passes = work["ratio"]["forward_passes"]
    batches = (
        f"of {work['planned_batches']} planned batches of texts, "
        f"{work['batches_that_do_not_fit']:.0%} did not fit"
    )
    failures = (
        f"Memory ran out {num_failures} time, and the run needed {passes:.2f} times "
        "the forward passes of a run that knew the limit"
    )
    updates = f"A training update that can be repeated took {extremes(ratios)} times as long"
    return f"{batches}. {failures}. {updates}"


def growth(figures: Figures) -> str:
    """The exponents of what grows with samples, and of what grows with ranks."""
    of_samples = []
    of_ranks = []
    for name, times in figures.items():
        exponents = of_ranks if "ranks" in name else of_samples
        exponents.append(times["exponent"])
    return (
        f"{extremes(of_samples)} with the number of samples, "
        f"{max(of_ranks):.2f} with the number of ranks"
    )


def ablation(figures: Figures) -> str:
    """What switching off a mechanism of planning costs on the file where it costs most."""
    costs = {name: of_files["most"] for name, of_files in figures["planning"].items()}
    dearest_first = sorted(costs, key=costs.__getitem__, reverse=True)
    return ". ".join(f"{name.capitalize()}: {costs[name]:+.0%}" for name in dearest_first)


def faults(figures: Figures) -> str:
    """Of the kinds of faults that the campaign has today."""
    kinds = import_module("benchmarks.faults.__main__").FAULTS
    counts = [count for name, count in figures["by_fault"].items() if name in kinds]
    num_findings = len(figures["findings"])
    findings = f"{num_findings} findings" if num_findings else "nothing found"
    return f"{sum(counts):,} cases, {len(counts)} kinds of faults, {findings}"


DOCTOR = (
    "doctor benchmarks/lengths/azure_llm_conv_2023.npz --column tokens --max-length 4k "
    "--batch-size 8 --world-size 4 --device cuda"
)


def doctor() -> list[str]:
    """What the example of docs/command-line.md prints."""
    from dynagroup.cli import main

    command, lengths, *options = DOCTOR.split()
    with redirect_stdout(StringIO()) as printed:
        main([command, str(ROOT / lengths), *options])
    output = printed.getvalue().splitlines()
    return ["```text", f"$ dynagroup {DOCTOR}", *output, "```"]


def gpu_train(figures: Figures) -> list[Row]:
    """A way to form batches a row: real tokens a second of each of its turns, batches an update, padding."""
    rows: dict[str, Row] = {}
    for turn in figures["train"]:
        key = f"{turn['way']}, with cuDNN" if turn["cudnn"] else turn["way"]
        if key not in rows:
            rows[key] = {"key": key, "rates": [], "batches": [], "padding": []}
        row = rows[key]
        rate = turn["real_tokens"] / turn["seconds"]
        row["rates"].append(f"{rate:,.0f}")
        row["batches"].append(turn["batches_per_update"])
        row["padding"].append(turn["padding"])
    return list(rows.values())


def gpu_shapes(figures: Figures) -> str:
    with_cudnn, without, *_ = figures["new_shapes"]
    return (
        f"{with_cudnn['new_s']:.2f} s for a new shape, "
        f"{with_cudnn['again_s']:.2f} s when it comes again; "
        f"without cuDNN {without['new_s']:.2f} s and {without['again_s']:.2f} s"
    )


def gpu_peaks(figures: Figures) -> list[str]:
    return import_module("benchmarks.memory").tabled(figures)


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
    text = Path(__file__).with_name("tables.md").read_text(encoding="utf-8").strip()
    tables = {"doctor": doctor()}
    for block in text.split("\n\n")[1:]:
        about, *lines = block.split("\n")
        name, result, *path = about.replace(":", "").split()
        tables[name] = lines_of_table(name, result, path, lines)
    contents = {}
    for name, table_lines in tables.items():
        joined = "\n".join(table_lines)
        contents[name] = f"\n\n{joined}\n\n"
    for name, (result, form) in SENTENCES.items():
        contents[name] = sentence(result, form)
    contents["versions"] = versions()
    return contents


def lines_of_table(name: str, result: str, path: list[str], lines: list[str]) -> list[str]:
    """A table and the note below it; ``lines`` are its head, its row, its entries (``=``) and its note (``>``)."""
    note = lines_after("> ", lines)
    entries = dict(line.split(": ", 1) for line in lines_after("= ", lines))
    try:
        figures = read(result, *path)
    except FileNotFoundError:
        content = [TO_RECORD]
    else:
        if entries:
            figures = {text: figures[key] for key, text in entries.items() if key in figures}
        content = filled_table(name, figures, lines)
    if not note:
        return content
    return [*content, "", *note]


def lines_after(mark: str, lines: list[str]) -> list[str]:
    """The lines that begin with a mark, without it."""
    return [line.removeprefix(mark) for line in lines if line.startswith(mark)]


def filled_table(name: str, figures: Any, lines: list[str]) -> list[str]:
    if name in WIDE:
        return WIDE[name](figures)
    to_rows = ROWS.get(name, rows_of)
    head, template = lines[:2]
    return table(to_rows(figures), head, template)


def sentence(result: str, form: str | Callable[[Any], str]) -> str:
    """``form`` is a template over the figures, or makes the sentence of them."""
    if not (RESULTS / f"{result}.json").exists():
        return TO_RECORD
    figures = read(result)
    if isinstance(form, str):
        return form.format_map(figures)
    return form(figures)


def versions() -> str:
    """Of the frameworks that the tests run with, as pinned for the newest Python."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if "==" in line:
            pin = line.split(";")[0].strip()
            name, number = pin.split("==")
            pins[name] = number
    return ", ".join(f"{name} {pins[name]}" for name in FRAMEWORKS)


def filled() -> dict[str, str]:
    """The pages with what stands between their marks written anew."""
    return {name: with_figures((ROOT / name).read_text(encoding="utf-8")) for name in PAGES}


def with_figures(page: str) -> str:
    def replaced(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- figures: {name} -->{shown()[name]}<!-- end -->"

    return MARK.sub(replaced, page)


def write() -> None:
    """Write the figures, as they are now, into the pages."""
    for name, text in filled().items():
        (ROOT / name).write_text(text, encoding="utf-8")

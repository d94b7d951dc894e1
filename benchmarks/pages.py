"""The figures of README and docs, written into the pages from ``benchmarks/results``: ``python scripts/bench.py pages``.

A page says ``<!-- figures: NAME -->`` and ``<!-- end -->``; what stands between them is the table of that name in ``tables.md``
or the sentence below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.record import RESULTS, Spread, over, rows_of, table

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"<!-- figures: (\w+) -->.*?<!-- end -->", re.S)
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
Figures = Mapping[str, Any]
Row = dict[str, Any]
TO_RECORD = "To be recorded again."
"""What stands where a file of results is missing."""


def read(result: str) -> Any:
    """The figures of a file of results; the demo, which writes its own, has no head beside them."""
    found = json.loads((RESULTS / f"{result}.json").read_text(encoding="utf-8"))
    return found.get("figures", found)


# Planning

IN_README = ("gsm8k", "azure_llm_conv_2023", "t0_mix_50k", "mooncake_conv", "python_files")


def padding(found: Figures) -> list[Row]:
    """Share of padding and steps of each way."""
    ways = {
        name: {way: f"{1 - each[0]:.1%}, {each[1]:,}" for way, each in one.items() if isinstance(each, Sequence)}
        for name, one in found.items()
    }
    return [{"key": name, "cv": found[name]["cv"], **ways[name]} for name in IN_README]


def few_shapes(found: Figures) -> list[Row]:
    """Predicted time over that of free shapes, of updates of 64 with 16 shapes; of the ladder with each number."""
    rows = []
    for name in (key.split(",")[0] for key in found if key.endswith("updates of 64, 16 shapes")):
        of = {number: found[f"{name}, updates of 64, {number} shapes"] for number in (4, 8, 16, 32)}
        ways = {way.replace(" ", "_"): f"{one['time']:.2f}" for way, one in of[16].items() if isinstance(one, Mapping)}
        ladders = {f"few_{number}": f"{one['ladder']['time']:.2f}" for number, one in of.items()}
        window = f"{found[f'{name}, a window, 16 shapes']['ladder']['time']:.2f}"
        rows.append({"key": name, "cv": of[16]["cv"], **ways, **ladders, "window": window})
    return sorted(rows, key=lambda row: row["cv"])


def growth(found: Figures) -> list[Row]:
    ends = {"first": ("costs", 0), "last": ("costs", -1), "least": ("sizes", 0), "most": ("sizes", -1)}
    return [{**row, **{end: row[name][place] for end, (name, place) in ends.items()}} for row in rows_of(found)]


def packing(dataset: str) -> Callable[[Figures], list[Row]]:
    """A way of packing a row; its time is relative to the first row's."""

    def rows(found: Figures) -> list[Row]:
        methods = rows_of(found["files"][dataset]["methods"])
        base = methods[0]["critical_path"]
        return [
            {**row, "time": row["critical_path"] / base, "same": "yes" if row["same_updates"] else "no"}
            for row in methods
        ]

    return rows


# Loading and training


def loader_speed(found: Figures) -> list[Row]:
    rates = lambda row: ", ".join(f"{value:,}" for value in row["samples_per_cpu_s"])  # noqa: E731
    return [{**row, "speeds": rates(row)} for row in rows_of(found)]


def demo_speed(found: Figures) -> str:
    low, high = found["speedup_quartiles"]
    return (
        f"{found['speedup']:.2f} times as many samples a second (quartiles over the updates: {low:.2f} to {high:.2f})"
    )


def rivals(same: bool) -> Callable[[Figures], list[str]]:
    """A method a row, a set of lengths a column: speed over fixed with its quartiles, and padding.

    Samples a second where all have the same updates; else real tokens.
    """

    def cell(methods: Figures, name: str) -> str:
        one, fixed = methods[name], methods["fixed"]
        base = fixed["samples_per_s"]["median"] if same else fixed["real_tokens_per_s"]
        scaled = one["samples_per_s"]["median"] if same else one["real_tokens_per_s"]
        spread = Spread(over(one["samples_per_s"], one["samples_per_s"]["median"] * base / scaled))
        return ", ".join([f"{spread:.2fx}", f"{one['padding']:.0%}", *map(str, one["setting"].values())])

    def lines(found: Figures) -> list[str]:
        runs = [one["methods"] for one in found.values()]
        names = [name for name, one in runs[0].items() if one["same_updates"] == same]
        rows = (" | ".join([name, *(cell(methods, name) for methods in runs)]) for name in names)
        head = " | ".join(["speed over fixed (quartiles), padding, setting", *found])
        return [f"| {head} |", "|---" * (len(runs) + 1) + "|", *(f"| {row} |" for row in rows)]

    return lines


def rivals_best(found: Figures) -> str:
    """Ours beside the best rival that keeps the updates, on each set."""
    sentences = []
    for case, one in found.items():
        same = {name: run["samples_per_s"]["median"] for name, run in one["methods"].items() if run["same_updates"]}
        theirs = max((name for name in same if not name.startswith("dynagroup")), key=same.__getitem__)
        ours = max((name for name in same if name.startswith("dynagroup")), key=same.__getitem__)
        figures = f"{same['dynagroup'] / same[theirs]:.2f} times that of {theirs}"
        sentences.append(f"{case}: {figures}" + f" ({ours}: {same[ours] / same[theirs]:.2f})" * (ours != "dynagroup"))
    return "; ".join(sentences)


def ranks_training(found: Figures) -> list[Row]:
    for row in (rows := rows_of(found)):
        row["speeds"] = ", ".join(f"{value:.0f}" for value in sorted(row["samples_per_s"]))
        row |= {"low": min(row["speed_over_fixed"]), "high": max(row["speed_over_fixed"])}
    return rows


def quality(found: Figures) -> list[Row]:
    ends = {"loss": mean, "low": min, "high": max}
    named = [(size, way, one) for size, ways in found["ways"].items() for way, one in ways.items()]
    figures = lambda one: {end: of(one["held_out_loss"]) for end, of in ends.items()}  # noqa: E731
    return [{"key": size, "way": way, **figures(one), "padding": mean(one["padding"])} for size, way, one in named]


# Recovery, faults, the command line


def recovery(update: Figures) -> list[Row]:
    work, about = read("oom_work"), f"{update['parameters'] / 1e6:.0f} million parameters"
    left = f"{work['batches_that_do_not_fit']:.0%} of {work['planned_batches']} planned batches do not fit"
    about_texts = f"{work['texts']:,} texts, {left}"
    names = {name: name.replace("_", " ") for name in work["ratio"]}
    knew = "relative to a run that knew the limit beforehand"
    found = {f"{about_texts}: {names[name]} {knew}": f"{x:.2f}x" for name, x in work["ratio"].items()}
    found["the same texts: how often memory ran out"] = work["learned"]["failures"]
    for case, one in update.get("updates", {}).items():
        found[f"an update of {case}, {about}, wall time relative to a plain update"] = f"{Spread(one['ratio']):.2fx}"
    return [{"key": key, "found": value} for key, value in found.items()]


def fault_rows(found: Figures) -> list[Row]:
    """Of the kinds of faults that the campaign has today."""
    kinds = import_module("benchmarks.faults.__main__").FAULTS
    return [{"key": name, "cases": count} for name, count in found["by_fault"].items() if name in kinds]


def faults(found: Figures) -> str:
    rows = fault_rows(found)
    findings = f"{len(found['findings'])} findings" if found["findings"] else "nothing found"
    return f"{sum(row['cases'] for row in rows):,} cases, {len(rows)} kinds of faults, {findings}"


def shards(found: Figures) -> list[Row]:
    over = lambda row: {rule: row["ours"] / row[rule] for rule in ("dealt", "differencing")}  # noqa: E731
    return [{**row, **over(row)} for row in rows_of(found["times"])]


DOCTOR = (
    "doctor benchmarks/lengths/azure_llm_conv_2023.npz --column tokens --max-length 4k --batch-size 8 --world-size 4"
)


def doctor() -> list[str]:
    """What the example of docs/command-line.md prints."""
    from dynagroup.cli import main

    with redirect_stdout(StringIO()) as printed:
        main([str(ROOT / word) if word.startswith("benchmarks/") else word for word in DOCTOR.split()])
    return ["```text", f"$ dynagroup {DOCTOR}", *printed.getvalue().splitlines(), "```"]


ROWS: dict[str, Callable[[Any], list[Row]]] = {
    "padding": padding,
    "growth": growth,
    "few_shapes": few_shapes,
    "packing_conversations": packing("azure_llm_conv_2023"),
    "packing_files": packing("python_files"),
    "loader_speed": loader_speed,
    "protocol": lambda found: found["windows"]["synth_sharegpt4o"],
    "ranks_training": ranks_training,
    "quality": quality,
    "recovery": recovery,
    "faults": fault_rows,
    "shards": shards,
}
"""The rows of tables that are more than the entries of their file."""
WIDE = {"rivals_same": rivals(True), "rivals_other": rivals(False)}
"""Tables whose columns depend on their file."""
SENTENCES: dict[str, tuple[str, str | Callable[[Any], str]]] = {
    "planning_memory": ("plan_speed", "{token_budget_1m_peak_mb_over_input:.0f} MB"),
    "demo_speed": ("demo_cpu", demo_speed),
    "demo_threads": ("demo_cpu", "{threads}"),
    "rivals_best": ("train_rivals", rivals_best),
    "embed_summary": (
        "embed",
        "{texts} docstrings of CV {cv:.2f}; vectors differ by at most {largest_difference_of_vectors:.0e}",
    ),
    "faults_summary": ("faults", faults),
}


def shown() -> dict[str, str]:
    """What stands between marks of each name: a table between empty lines, or a sentence."""
    found = {"doctor": doctor()}
    text = Path(__file__).with_name("tables.md").read_text(encoding="utf-8").strip()
    for about, *lines in (block.split("\n") for block in text.split("\n\n")[1:]):
        name, result, *path = about.replace(":", "").split()
        note = [line[2:] for line in lines if line.startswith("> ")]
        names = dict(line[2:].split(": ", 1) for line in lines if line.startswith("= "))
        try:
            figures = read(result)[path[0]] if path else read(result)
            figures = {text: figures[key] for key, text in names.items() if key in figures} if names else figures
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
    return ", ".join(
        f"{name} {pins[name]}" for name in ("torch", "transformers", "trl", "accelerate", "lightning", "xgboost")
    )


def filled() -> dict[str, str]:
    """The pages with what stands between their marks written anew."""
    figures, pages = shown(), {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    mark = lambda found: f"<!-- figures: {found[1]} -->{figures[found[1]]}<!-- end -->"  # noqa: E731
    return {name: MARK.sub(mark, page) for name, page in pages.items()}


def write() -> None:
    """Write the figures, as they are now, into the pages."""
    for name, text in filled().items():
        (ROOT / name).write_text(text, encoding="utf-8")

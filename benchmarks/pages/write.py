"""Which figure stands where: between marks of a page, or as rows of a table."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO

from benchmarks.pages.cells import ROOT
from benchmarks.pages.loading import (
    balance_sentence,
    fill_rows,
    learned_sentence,
    loader_rows,
    overhead_sentence,
    protocol_rows,
    ranks_rows,
)
from benchmarks.pages.planning import (
    SHOWN,
    cut_rows,
    efficiency_table,
    growth_rows,
    padding_rows,
    rival_sentence,
    shards_rows,
    speed_memory,
    speed_rows,
    streams_rows,
)
from benchmarks.pages.recovery import (
    embed_rows,
    embed_sentence,
    fault_rows,
    fault_sentence,
    generation_rows,
    recovery_rows,
)
from benchmarks.pages.training import (
    demo_sentence,
    demo_table,
    objective_rows,
    quality_rows,
    quality_sentence,
    ranks_training_rows,
    rivals_rows,
    rivals_sentence,
    rivals_updates,
    trainer_rows,
)

DOCTOR = (
    "doctor benchmarks/lengths/azure_llm_conv_2023.npz --column tokens --max-length 4k --batch-size 8 --world-size 4"
)
MARK = re.compile(r"<!-- figures: (\w+) -->.*?<!-- end -->", re.S)
MARKED = ("docs/benchmarks.md", "docs/alignment.md", "docs/planning.md")

FIGURES: dict[str, Callable[[], str | list[str]]] = {
    "planning_speed": speed_rows, "planning_memory": speed_memory, "planning_rival": rival_sentence, "cut": cut_rows,
    "efficiency": efficiency_table, "growth": growth_rows, "generation": generation_rows,
    "demo": demo_table, "demo_speed": demo_sentence,
    "rivals": rivals_rows, "rivals_updates": rivals_updates, "rivals_best": rivals_sentence, "faults": fault_rows,
    "faults_summary": fault_sentence, "loader_speed": loader_rows, "loader_overhead": overhead_sentence,
    "loader_fill": fill_rows, "ranks": ranks_rows, "protocol": protocol_rows, "ranks_learned": learned_sentence,
    "balance": balance_sentence, "ranks_training": ranks_training_rows, "recovery": recovery_rows, "embed": embed_rows,
    "embed_summary": embed_sentence, "trainer": trainer_rows, "quality": quality_rows,
    "quality_summary": quality_sentence, "shards": shards_rows,
    "objective": objective_rows,
}  # fmt: skip
"""What stands between marks of that name."""


def pages_with_figures() -> dict[str, str]:
    """The pages with their figures as they are now."""
    readme, shell = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/command-line.md"))
    sentence = re.compile(r"[\d.]+x samples/s in the median update \([^)]*\)")
    marked = {page: filled((ROOT / page).read_text(encoding="utf-8")) for page in MARKED}
    return {
        **marked,
        "README.md": _with_rows(sentence.sub(demo_sentence(), readme), f"| {SHOWN[0]} ", padding_rows()),
        "docs/seq2seq.md": _with_rows(
            (ROOT / "docs/seq2seq.md").read_text(encoding="utf-8"), "| translation (", streams_rows()
        ),
        "docs/command-line.md": re.sub(
            r"\$ dynagroup doctor .*?(?=```)",
            lambda _: f"$ dynagroup {DOCTOR}\n{doctor_output()}",
            shell,
            count=1,
            flags=re.S,
        ),
    }


def filled(page: str) -> str:
    """``page`` with what stands between ``<!-- figures: NAME -->`` and ``<!-- end -->`` written anew."""
    return MARK.sub(lambda found: f"<!-- figures: {found[1]} -->{shown(found[1])}<!-- end -->", page)


def shown(name: str) -> str:
    """A sentence, or a table between empty lines."""
    found = FIGURES[name]()
    return found if isinstance(found, str) else "\n\n" + "\n".join(found) + "\n\n"


def _with_rows(page: str, first: str, rows: list[str]) -> str:
    """``page`` with the rest of the table from the row that begins with ``first`` replaced."""
    start = page.index("\n" + first) + 1
    return page[:start] + "\n".join(rows) + page[page.index("\n\n", start) :]


def doctor_output() -> str:
    """What the example of docs/command-line.md prints."""
    from dynagroup.cli import main

    with redirect_stdout(StringIO()) as printed:
        main([str(ROOT / word) if word.startswith("benchmarks/") else word for word in DOCTOR.split()])
    return printed.getvalue()


def write() -> None:
    """Write the figures, as they are now, into the pages."""
    for name, text in pages_with_figures().items():
        (ROOT / name).write_text(text, encoding="utf-8")

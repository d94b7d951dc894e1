"""The figures of README and docs, written into the pages from ``benchmarks/results``: ``python scripts/bench.py pages``.

A page says ``<!-- figures: NAME -->`` and ``<!-- end -->``; what stands between them is the table or sentence of that name below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
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


def read(result: str) -> Any:
    """The figures of a file of results; the demo, which writes its own, has no head beside them."""
    found = json.loads((RESULTS / f"{result}.json").read_text(encoding="utf-8"))
    return found.get("figures", found)


def named(names: Mapping[str, str]) -> Callable[[Figures], list[Row]]:
    """A row an entry of these, under another name."""
    return lambda found: [{"key": name, **found[key]} for key, name in names.items()]


# Planning

IN_README = ("gsm8k", "azure_llm_conv_2023", "t0_mix_50k", "mooncake_conv", "python_files")


def padding(found: Figures) -> list[Row]:
    ways = {
        name: {way: (1 - one[way][0], one[way][1]) for way in one if way not in ("samples", "cv")}
        for name, one in found.items()
    }
    return [{"key": name, "cv": found[name]["cv"], **ways[name]} for name in IN_README]


PLANNING = {
    "token_budget_1m": "1,000,000 lengths, `TokenBudget`",
    "token_budget_1m_shuffled": "the same, `shuffle=True`",
    "token_budget_10m": "10,000,000 lengths",
    "memory_budget_1m_pretrained": "1,000,000 lengths, `MemoryBudget` with the pretrained regressor",
    "two_padded_streams_1m": "1,000,000 samples with two padded streams, sorted by both",
    "first_batch_of_10m_window_4096": "first batch of 10,000,000, `window=4096`",
}


def growth(found: Figures) -> list[Row]:
    ends = {"first": ("costs", 0), "last": ("costs", -1), "least": ("sizes", 0), "most": ("sizes", -1)}
    return [{**row, **{end: row[name][place] for end, (name, place) in ends.items()}} for row in rows_of(found)]


def packing(dataset: str) -> Callable[[Figures], list[Row]]:
    """A way of packing a row; its time is relative to the first row's."""

    def rows(found: Figures) -> list[Row]:
        methods = rows_of(found["files"][dataset]["methods"])
        base = methods[0]["critical_path"]
        return [{**row, "time": row["critical_path"] / base, "same": yes(row["same_updates"])} for row in methods]

    return rows


def yes(truth: bool) -> str:
    return "yes" if truth else "no"


# Loading and training


def loader_speed(found: Figures) -> list[Row]:
    peers = {"plain": "plain, 16 a batch", "odb": "online-dynamic-batching, window 256"}
    rows = [row for row in rows_of(found) if " / " not in row["key"]]
    for row in rows:
        row["speeds"] = ", ".join(f"{value:,}" for value in row["samples_per_cpu_s"])
        row |= {short: ratio for short, peer in peers.items() if (ratio := found.get(f"{row['key']} / {peer}"))}
    return rows


def demo_speed(found: Figures) -> str:
    low, high = found["speedup_quartiles"]
    return f"{found['speedup']:.2f}x samples/s in the median update (middle half: {low:.2f}x to {high:.2f}x)"


def rivals(found: Figures) -> list[Row]:
    """Samples a second only where every method had the same ones."""
    rows = [{"case": case, **row} for case, one in found.items() for row in rows_of(one["methods"])]
    for row in rows:
        fixed = found[row["case"]]["methods"]["fixed"]
        row |= {"tokens": row["real_tokens_per_s"] / fixed["real_tokens_per_s"], "same": yes(row["same_updates"])}
        if row["same_updates"]:
            row |= {"speed": over(row["samples_per_s"], fixed["samples_per_s"]["median"]), "loss": row["held_out_loss"]}
    return rows


def rivals_best(found: Figures) -> str:
    """Where ours is fastest among those that keep the updates, and where not."""
    sentences = []
    for case, one in found.items():
        same = {name: run["samples_per_s"]["median"] for name, run in one["methods"].items() if run["same_updates"]}
        best = max((name for name in same if not name.startswith("dynagroup")), key=same.__getitem__)
        sentences.append(f"{case}: {same['dynagroup'] / same[best]:.2f} times the best of them ({best})")
    return "; ".join(sentences)


def ranks_training(found: Figures) -> list[Row]:
    rows = named({"fixed": "fixed batches", "update": "`samples_per_update=128`", "free": "free-running"})(found)
    for row in rows:
        row["speeds"] = ", ".join(f"{value:.0f}" for value in sorted(row["samples_per_s"]))
        row |= {"low": min(row["speed_over_fixed"]), "high": max(row["speed_over_fixed"])}
    return rows


TRAINER = {
    "plain_over_plain": "a plain Trainer over another (control)",
    "equal_batches": "dynagroup over plain, equal batches",
    "tiny_equal_batches": "the same with a model of one layer of 8, where the adapter is not lost in noise",
    "texts": "dynagroup over plain, lengths like texts (lognormal, 8 to 128 tokens)",
}


def quality(found: Figures) -> list[Row]:
    named = [(size, way, one) for size, ways in found["ways"].items() for way, one in ways.items()]
    ends = {"loss": mean, "low": min, "high": max}
    return [
        {
            "key": size,
            "way": way,
            **{end: of(one["held_out_loss"]) for end, of in ends.items()},
            "padding": mean(one["padding"]),
        }
        for size, way, one in named
    ]


# Recovery, faults, the command line


def recovery(update: Figures) -> list[Row]:
    work, about = read("oom_work"), f"{update['parameters'] / 1e6:.0f} million parameters, {update['ranks']} gloo ranks"
    left = f"{work['batches_that_do_not_fit']:.0%} of {work['planned_batches']} planned batches do not fit"
    found = {
        f"{work['texts']:,} texts, {left}: {name} over a run that knew": f"{x:.2f}x"
        for name, x in work["ratio"].items()
    }
    found["times that it ran out of memory there"] = work["learned"]["failures"]
    for number, one in update["batches_an_update"].items():
        found[f"an update of {number} over DDP's own ({about}), wall time"] = f"{Spread(one['ratio']):.2fx}"
    return [{"key": key, "found": value} for key, value in found.items()]


def faults(found: Figures) -> str:
    findings = f"{len(found['findings'])} findings" if found["findings"] else "nothing found"
    return f"{found['cases']:,} cases, {len(found['by_fault'])} kinds of faults, {findings}"


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
    "planning_speed": named(PLANNING),
    "planning_rival": lambda found: [{"size": key[11:], **one} for key, one in found.items() if key != "samples"],
    "growth": growth,
    "packing_conversations": packing("azure_llm_conv_2023"),
    "packing_files": packing("python_files"),
    "loader_speed": loader_speed,
    "protocol": lambda found: found["windows"]["synth_sharegpt4o"],
    "rivals": rivals,
    "ranks_training": ranks_training,
    "trainer": named(TRAINER),
    "quality": quality,
    "recovery": recovery,
    "faults": lambda found: [{"key": name, "cases": count} for name, count in found["by_fault"].items()],
}
"""The rows of tables below that are more than the entries of their file."""
TABLES = """
padding: plan_padding
| lengths | fixed 16, shuffled | HF `group_by_length` | dynagroup, `samples_per_update=32` | with `grouping=50` | \
`samples_per_update=256` | `shuffle=True` | sorted |
| {key} (CV {cv:.2f}) | {fixed_16_shuffled[0]:.1%}, {fixed_16_shuffled[1]:,} | {hf_group_by_length_16[0]:.1%}, \
{hf_group_by_length_16[1]:,} | {dynagroup_update_of_32[0]:.1%}, {dynagroup_update_of_32[1]:,} | \
{dynagroup_grouping_50_of_32[0]:.1%}, {dynagroup_grouping_50_of_32[1]:,} | \
{dynagroup_update_of_256[0]:.1%}, {dynagroup_update_of_256[1]:,} | \
{dynagroup_shuffle[0]:.1%}, {dynagroup_shuffle[1]:,} | {dynagroup_whole_set[0]:.1%}, {dynagroup_whole_set[1]:,} |

planning_speed: plan_speed
| | CPU time |
| {key} | {median_s:.3g} s ({min_s:.3g} to {max_s:.3g}) |

planning_rival: plan_rival
| batch size | dynabatch | `MemoryBudget` | times faster | `TokenBudget` | times faster |
| {size} | {dynabatch[median_s]:.3g} s | {memory_budget[median_s]:.3g} s | {times_faster_memory_budget:,.0f} | \
{token_budget[median_s]:.3g} s | {times_faster_token_budget:,.0f} |

growth: growth
| | over | from, to | exponent |
| {key} | {least:,} to {most:,} {over} | {first:.3g} to {last:.3g} {unit} | {exponent:.2f} |

packing_conversations: pack
| | steps | tokens of the cap used | dearest rank / mean | samples cut | left out | updates of fixed batches | predicted time |
| {key} | {steps:,} | {fill:.1%} | {row_imbalance:.2f} | {samples_cut:,} | {samples_dropped:,} | {same} | {time:.2f} |

packing_files: pack
| | steps | tokens of the cap used | dearest rank / mean | samples cut | left out | updates of fixed batches | predicted time |
| {key} | {steps:,} | {fill:.1%} | {row_imbalance:.2f} | {samples_cut:,} | {samples_dropped:,} | {same} | {time:.2f} |

ablation: ablation planning
| without | predicted time: mean | worst | where | CPU time of planning, of that with it |
| {key} | {mean:+.2%} | {most:+.2%} | {worst} | {speed:.1f}x |

ablation_rooms: ablation rooms
| mechanism | lines | what is counted | with | without | what stands in |
| {key} | {lines:,} | {unit} | {with:.6g} | {without:.6g} | {instead} |

quality: quality
| | samples of an update | held-out loss, mean (least to most) | padding |
| {key} | {way} | {loss:.3f} ({low:.3f} to {high:.3f}) | {padding:.1%} |

loader_speed: loader_speed
| loader | samples a CPU second | real / padded tokens | over plain | over online-dynamic-batching |
| {key} | {speeds} | {real_share:.3f} | {plain:.1fx} | {odb:.1fx} |

protocol: loader_ranks
| ranks | this protocol | fixed shards, aligned at the end | every window aligned | exchanges an epoch | bytes a rank a step |
| {ranks:,} | {above_all_batches_over_ranks:.1%} | {above_with_fixed_shards:.1%} | \
{above_with_alignment_of_every_window:.1%} | {exchanges} | {bytes_a_rank_a_step:.0f} |

demo: demo_cpu runs
| | samples/s | real tokens/s | padding | largest batch | steps | updates | CPU s | held-out loss |
| {key} | {samples_per_s:.0f} | {real_tokens_per_s:,.0f} | {padding:.1%} | {largest_batch_tokens:,} | {steps} | {updates} | \
{seconds:.0f} | {held_out_loss:.4f} |

rivals: train_rivals
| lengths | method | real tokens/s over fixed | samples/s over fixed (quartiles) | padding | batches an update | loss | same |
| {case} | {key} | {tokens:.2f}x | {speed:.2fx} | {padding:.1%} | {batches_per_update:.1f} | {loss:.4f} | {same} |

ranks_training: loader_train
| | samples/s | against fixed | held-out loss | updates | steps |
| {key} | {speeds} | {low:.2f}x to {high:.2f}x | {held_out_loss:.3f} | {updates} | {steps} |

trainer: trainer
| | median ratio (quartiles) | 95 % interval of the median | difference an update |
| {key} | {ratio:.3f} | {ratio[median_95][0]:.3f} to {ratio[median_95][1]:.3f} | {difference_ms[median]:.1f} ms |

objective: objective
| samples/s (padding) | fewest batches | least time | least time, a step costs 128 |
| {key} | {methods[fewest][samples_per_s][median]:.0f} ({methods[fewest][padding]:.0%}) | \
{methods[time][samples_per_s][median]:.0f} ({methods[time][padding]:.0%}) | \
{methods[time, a step costs 128][samples_per_s][median]:.0f} ({methods[time, a step costs 128][padding]:.0%}) |

embed: embed methods
| | CPU s | against fixed |
| {key} | {cpu_s[median]:.1f} | {speed:.2fx} |

generation: generate_rivals methods
| | against fixed | batches | padding of prompts | largest batch, tokens |
| {key} | {speed:.2fx} | {batches} | {padding:.1%} | {largest_batch_tokens:,} |

recovery: oom_update
| | found |
| {key} | {found} |

faults: faults
| fault | cases |
| {key} | {cases} |
"""
"""A name, its file of results and what is shown of it; the head; what stands in a row."""
SENTENCES: dict[str, tuple[str, str | Callable[[Any], str]]] = {
    "planning_memory": ("plan_speed", "{token_budget_1m_peak_mb_over_input:.0f} MB"),
    "demo_speed": ("demo_cpu", demo_speed),
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
    for about, head, row in (block.split("\n") for block in TABLES.strip().split("\n\n")):
        name, result, *path = about.replace(":", "").split()
        figures = read(result)[path[0]] if path else read(result)
        found[name] = table(ROWS.get(name, rows_of)(figures), head, row)
    made = {name: "\n\n" + "\n".join(lines) + "\n\n" for name, lines in found.items()}
    for name, (result, said) in SENTENCES.items():
        made[name] = said.format_map(read(result)) if isinstance(said, str) else said(read(result))
    return made


def filled() -> dict[str, str]:
    """The pages with what stands between their marks written anew."""
    figures, pages = shown(), {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    mark = lambda found: f"<!-- figures: {found[1]} -->{figures[found[1]]}<!-- end -->"  # noqa: E731
    return {name: MARK.sub(mark, page) for name, page in pages.items()}


def write() -> None:
    """Write the figures, as they are now, into the pages."""
    for name, text in filled().items():
        (ROOT / name).write_text(text, encoding="utf-8")

"""Figures of running out of memory, of generating and embedding, and of the fault campaign."""

from __future__ import annotations

from benchmarks.pages.cells import ratio, read, row, rule


def recovery_rows() -> list[str]:
    calls, work = read("oom_wrapper")["figures"], read("oom_work")["figures"]["ratio"]
    runs, update = read("oom_generation")["figures"], read("oom_update")["figures"]
    beyond = calls["OomSafeBackward"]["median"] - calls["plain backward"]["median"]
    share = runs["planned_batches_that_do_not_fit"]
    lines = [
        ("`run_with_oom_retry` around a call that fits", "under 20 us", f"{calls['run_with_oom_retry']['median']:.1f} us"),
        ("`generate_with_oom_retry` around a call that fits", "under 20 us",
         f"{calls['generate_with_oom_retry']['median']:.1f} us"),
        ("`OomSafeBackward`, beyond a plain backward pass, one rank", "none", f"{beyond:.0f} us"),
        (f"{runs['texts']:,} texts, {share:.0%} of {runs['planned_batches']} planned batches do not fit, against a run that "
         "knew the limit", "at most 1.1x", f"{ratio(runs['ratio'])}, {runs['out_of_memory_errors']} failure"),
        ("the same two runs counted instead of timed: forward passes, tokens through the model", "at most 1.1x",
         f"{work['forward_passes']:.2f}x, {work['tokens']:.2f}x"),
        ("the same shape failing twice in a row", "never",
         "yes" if runs["same_shape_failed_twice_in_a_row"] else "never"),
        (f"an update of 12.6 million parameters on {update['ranks']} gloo ranks, against DDP's own exchange", "none",
         f"{ratio(update['ratio'])}, wall time on a busy machine"),
    ]  # fmt: skip
    return [row("", "target", "reached"), rule(3), *(row(*line) for line in lines)]


def embed_rows() -> list[str]:
    figures = read("embed")["figures"]
    rows = [row(name, f"{one['cpu_s']['median']:.1f}", ratio(one["speed"])) for name, one in figures["methods"].items()]
    return [row("", "CPU s", "against fixed"), rule(3), *rows]


def embed_sentence() -> str:
    found = read("embed")["figures"]
    return (
        f"{found['texts']} docstrings, {found['tokens']:,} tokens of CV {found['cv']:.2f}; vectors differ by at most "
        f"{found['largest_difference_of_vectors']:.0e}"
    )


def generation_rows() -> list[str]:
    figures = read("generate_rivals")["figures"]
    rows = [
        row(name, ratio(one["speed"]), str(one["batches"]), f"{one['padding']:.1%}", f"{one['largest_batch_tokens']:,}")
        for name, one in figures["methods"].items()
    ]
    return [row("", "against fixed", "batches", "padding of prompts", "largest batch, tokens"), rule(5), *rows]


def fault_rows() -> list[str]:
    found = read("faults")["figures"]["by_fault"]
    return [row("fault", "cases"), rule(2), *(row(name, str(count)) for name, count in found.items())]


def fault_sentence() -> str:
    found = read("faults")["figures"]
    findings = f"{len(found['findings'])} findings" if found["findings"] else "nothing found"
    return f"{found['cases']:,} cases, {len(found['by_fault'])} kinds of faults, {findings}"

"""The command line says what the library says, and a user's mistake in one line; never a traceback."""

import contextlib
import io
import json
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from transformers import AutoConfig

import dynagroup
from dynagroup import BatchPlan, LengthAwareBatchSampler, MemoryBudget, TokenBudget, Work
from dynagroup.cli import main
from dynagroup.demo import train_tokenizer
from dynagroup.plan.compare import compare
from dynagroup.plan.cost import local_device
from dynagroup.shapes import BatchShape
from tests import models

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 100, 200).astype(np.int32)
TARGET = LENGTHS[::-1]
ODD = LENGTHS % 2
CHATS = b'{"c": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}\n'
TOKENIZED = ["--tokenizer", "tokens"]
NO_MODELS = ["unknown", "cut_off", "empty", "no/such/model", "lengths.npy", "", "\0"]


def write_models(folder: Path) -> None:
    words = ["a few words to learn from, and some more"]
    tokenizer = train_tokenizer(words * 4, vocabulary=300)
    tokenizer.save_pretrained(folder / "tokens")
    model = models.gpt2(
        vocab=500,
        width=64,
        layers=1,
        dropout=0.1,
        n_positions=160,
        bos_token_id=None,
        eos_token_id=None,
    )
    model.save_pretrained(folder / "model")


def write_what_is_no_model(folder: Path) -> None:
    for name in ("unknown", "cut_off", "empty"):
        (folder / name).mkdir()
    (folder / "unknown" / "config.json").write_text('{"model_type": "nosuch"}')
    (folder / "cut_off" / "config.json").write_text('{"model_type": ')


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where commands run: lengths, texts, a table, a tokenizer, a model, and what is none of them; no hub."""
    path = tmp_path_factory.mktemp("cli")
    np.save(path / "lengths.npy", LENGTHS)
    (path / "texts.txt").write_text("some text\nmore of it\n")
    (path / "many.txt").write_text("one text\n" * 8)
    (path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    write_models(path)
    write_what_is_no_model(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.chdir(path)
        yield path


class Result(NamedTuple):
    status: int
    out: str
    error: str


def status_of(arguments: tuple[str, ...]) -> int:
    try:
        return main(arguments)
    except SystemExit as stopped:  # argparse's own refusal
        return int(stopped.code or 0)


def run(*arguments: str) -> Result:
    """Runs a command in this process."""
    out = io.StringIO()
    error = io.StringIO()
    with (
        contextlib.redirect_stderr(error),
        contextlib.redirect_stdout(out),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        status = status_of(arguments)
    return Result(status, out.getvalue(), error.getvalue())


def answer(*arguments: str) -> str:
    result = run(*arguments)
    assert result.status == 0, result.error
    return result.out


def figures(*arguments: str) -> Any:
    text = answer(*arguments, "--json")
    return json.loads(text)


def refusal(*arguments: str) -> str:
    result = run(*arguments)
    assert result.status == 2
    assert result.error.count("\n") == 1, result.error
    assert result.error.startswith(f"dynagroup {arguments[0]}: ")
    return result.error


# The tests run where the commands do, so both predict for this machine's device.
COUNTED = f"200 rows, {int(LENGTHS.sum()):,} tokens in all, the longest {int(LENGTHS.max()):,}"
DEVICE = f"time is predicted for {local_device()}, this machine; for another: --device cuda or --device cpu"


ENDING = f"{COUNTED}\n{DEVICE}\n"


def plan_of(lengths: Any, max_tokens: int, *, world_size: int = 1, kinds: Any = None) -> BatchPlan:
    budget = TokenBudget(max_tokens)
    sampler = LengthAwareBatchSampler(lengths, budget, rank=0, world_size=world_size, kinds=kinds)
    return sampler.plan


def write(path: Path, columns: dict[str, Any]) -> None:
    """A file of the kind that its ending says; without one, what `save_to_disk` writes."""
    table = Dataset.from_dict(columns)
    match path.suffix:
        case ".npy":
            np.save(path, columns["tokens"])
        case ".txt":
            np.savetxt(path, columns["tokens"], fmt="%d")
        case ".npz":
            numbers = dict(columns)
            numbers.pop("name", None)
            np.savez(path, **numbers)
        case ".json":
            path.write_text(json.dumps(table.to_list()))
        case ".csv":
            table.to_csv(str(path), index=False)
        case ".tsv":
            table.to_csv(str(path), index=False, sep="\t")
        case ".jsonl":
            table.to_json(str(path))
        case ".parquet":
            table.to_parquet(str(path))
        case _:
            dataset = DatasetDict({"train": table})
            dataset.save_to_disk(str(path))


def assert_lengths_are_read(path: Path, columns: dict[str, Any]) -> None:
    write(path, columns)
    plan = figures("plan", str(path), "--max-tokens", "1k", "--max-length", "50")
    kept = np.minimum(LENGTHS, 50)
    assert plan["real_tokens"] == int(kept.sum())


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.txt"])
def test_a_file_may_have_lengths_alone(tmp_path, name):
    assert_lengths_are_read(tmp_path / name, {"tokens": LENGTHS})


@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
def test_lengths_may_stand_beside_other_columns(tmp_path, name):
    assert_lengths_are_read(tmp_path / name, {"name": ["a"] * 200, "length": LENGTHS})


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet", "saved"])
def test_the_ids_themselves_have_lengths(tmp_path, name):
    ids = [[7] * length for length in LENGTHS.tolist()]
    assert_lengths_are_read(tmp_path / name, {"input_ids": ids, "label": [0] * 200})


PAIRS = {
    "name": ["x"] * 200,
    "source": LENGTHS.tolist(),
    "target": TARGET.tolist(),
    "chars": (4 * LENGTHS).tolist(),
    "odd": ODD.tolist(),
}


@pytest.fixture(params=["x.npz", "x.csv", "x.json", "x.parquet", "saved"])
def pairs(tmp_path, request) -> str:
    path = tmp_path / request.param
    write(path, PAIRS)
    return str(path)


def test_streams_are_the_columns_that_were_named_and_the_output_says_which(pairs):
    out = answer("plan", pairs, "--column", "source,target", "--max-tokens", "800")
    first, report = out.split("\n", 1)
    assert first.startswith("streams: source, target (")
    plan = plan_of({"source": LENGTHS, "target": TARGET}, 800)
    source = COUNTED.replace("tokens", "source")
    target = COUNTED.replace("tokens", "target")
    assert report == f"{plan.report()}\n{source}\n{target}\n{DEVICE}\n"


def test_one_column_is_no_stream_and_another_one_may_be_the_kinds(pairs):
    out = answer("plan", pairs, "--column", "source", "--kinds", "odd", "--max-tokens", "800")
    plan = plan_of(LENGTHS, 800, kinds=ODD)
    assert out == f"{plan.report()}\n{ENDING}"


def test_without_a_choice_all_arrays_are_streams_which_is_told_beside_json(tmp_path):
    path = tmp_path / "x.npz"
    write(path, PAIRS)
    result = run("compare", str(path), "--batch-size", "8", "--json")
    assert result.status == 0
    assert result.error.startswith("streams: source, target, chars, odd (")
    assert json.loads(result.out)


def npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def zipped(**arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


UNREADABLE = "cannot be read in the format of its ending"
SQUARE = "one number per sample, but is an array of shape (2, 2)"
SCALAR = "must be one number per sample, but is an array of shape ()"
LABELS = "`kinds` has 1 labels for 2 lengths"
NO_TEMPLATE = "`tokenizer` has no chat template; set tokenizer.chat_template"
NO_TOKENIZER = ["--tokenizer", "no/such/tokenizer/here"]
KINDS_B = ["--column", "a", "--kinds", "b"]
CHOOSE = "columns ['a', 'b']; choose one with `--column A`"


@pytest.mark.parametrize(
    ("name", "content", "arguments", "message"),
    [
        ("x.npy", b"no array", [], UNREADABLE),
        ("x.npy", npy([[3, 4], [5, 6]]), [], SQUARE),
        ("x.npy", npy(5), [], SCALAR),
        ("x.npz", zipped(a=[3, 4], b=[5]), [], "{'a': 2, 'b': 1} samples"),
        ("x.npz", zipped(a=[3, 4], b=5), KINDS_B, LABELS),
        ("x.npz", zipped(), [], "'x.npz' has no samples"),
        ("x.txt", b"\xff\xfe\x00", [], UNREADABLE),
        ("x.txt", b"", [], "'x.txt' has no samples"),
        ("x.fasta", b"\n", ["--length-of", "characters"], "'x.fasta' has no samples"),
        ("x.csv", b"length\n", [], "'x.csv' has no samples"),
        ("x.txt", b"3\n-4\n", [], "must be a whole number from 0"),
        ("x.txt", b"some text", NO_TOKENIZER, "no/such/tokenizer/here"),
        ("x.csv", b"a,b\n1,2\n", [], CHOOSE),
        ("x.csv", b"a,length\n1,2\n3,4,5\n", [], "saw 3"),
        ("x.csv", b'a,length\n1,"2\n3,4\n', [], UNREADABLE),
        ("x.jsonl", CHATS, ["--column", "c", *TOKENIZED], NO_TEMPLATE),
        ("x.jsonl", b'{"length": 3}\n{"length": \n', [], UNREADABLE),
        ("x.docx", b"", [], "has an unknown file ending"),
        ("empty", None, [], UNREADABLE),
    ],
)
def test_a_wrong_file_is_one_line(folder, name, content, arguments, message):
    if content is not None:
        (folder / name).write_bytes(content)
    assert message in refusal("plan", name, "--max-tokens", "8", *arguments)


def test_a_mark_of_utf_8_is_no_part_of_a_text(tmp_path, folder):
    plans = []
    for encoding in ("utf-8-sig", "utf-8"):
        path = tmp_path / f"{encoding}.txt"
        path.write_text("one two\nfour\n", encoding=encoding)
        plans.append(figures("plan", str(path), "--max-tokens", "80", *TOKENIZED))
    marked, plain = plans
    assert marked["num_samples"] == 2
    assert marked["real_tokens"] == plain["real_tokens"]


PLAN = ["plan", "lengths.npy"]


def test_plan_says_what_the_plan_says(folder):
    picture = folder / "a new folder" / "plan.png"
    options = ["--max-tokens", "800", "--world-size", "4", "--picture", str(picture)]
    plan = plan_of(LENGTHS, 800, world_size=4)
    assert answer(*PLAN, *options) == f"{plan.report()}\n{ENDING}picture: {picture}\n"
    image = picture.read_bytes()
    assert image.startswith(b"\x89PNG")


def test_plan_counts_updates(folder):
    options = ["--max-tokens", "800", "--shuffle", "--samples-per-update", "32"]
    assert figures(*PLAN, *options)["num_updates"] == 7


@pytest.mark.parametrize(("text", "tokens"), [("16k", 16384), ("16_384", 16384)])
def test_a_number_of_tokens_may_be_written_short(folder, text, tokens):
    printed = figures(*PLAN, "--max-tokens", text)
    plan = plan_of(LENGTHS, tokens)
    assert printed["fingerprint"] == plan.fingerprint


COMPARE = ["compare", "lengths.npy", "--batch-size", "8", "--world-size", "2"]


def test_compare_says_what_compare_says(folder):
    picture = folder / "new" / "compare.png"
    report = compare(LENGTHS, 8, world_size=2).report()
    out = answer(*COMPARE, "--picture", str(picture))
    assert out == f"{report}\n{ENDING}picture: {picture}\n"


def test_compare_predicts_the_time_of_a_model(folder):
    config = AutoConfig.from_pretrained(folder / "model")
    work = Work.of(config, device=local_device())
    comparison = compare(LENGTHS, 8, world_size=2, work=work)
    printed = figures(*COMPARE, "--model", "model")
    counts = printed.pop("counts")
    assert counts["tokens"]["num_samples"] == len(LENGTHS)
    assert printed == comparison.figures()


@pytest.fixture(scope="module")
def diagnosis(folder) -> list[str]:
    """The lines of a doctor's answer."""
    out = answer("doctor", "lengths.npy", "--batch-size", "8", "--world-size", "4")
    return out.splitlines()


def test_doctor_begins_with_a_change_and_its_reasons(diagnosis):
    words = [line.split()[0] for line in diagnosis[:4]]
    assert words == ["change", "waste", "ranks", "memory"]


def test_doctor_ends_with_the_comparison(diagnosis):
    report = compare(LENGTHS, 8, world_size=4).report()
    assert diagnosis[5:] == [*report.splitlines(), COUNTED, DEVICE]


def test_doctor_says_what_is_wrong_and_what_to_change(diagnosis):
    change, waste, ranks, *_ = diagnosis
    fixed = compare(LENGTHS, 8, world_size=4).ways[0]
    assert f"{fixed.padding:.0%} of the tokens" in waste
    assert f"{fixed.waiting:.0%} of their time" in ranks
    assert f"TokenBudget({8 * LENGTHS.max()}), samples_per_update=32" in change


def test_doctor_advises_nothing_that_does_not_pay(folder):
    (folder / "equal.txt").write_text("64\n" * 200)
    page = folder / "doctor.html"
    out = answer("doctor", "equal.txt", "--batch-size", "8", "--html", str(page))
    assert "nothing: other batches of the same updates" in out
    assert "group_by_length 8" in page.read_text(encoding="utf-8")


def test_doctor_advises_grouping_where_large_updates_pay(folder):
    rng = np.random.default_rng(0)
    like_gsm8k = rng.lognormal(5, 0.35, 3200).astype(int)
    np.savetxt(folder / "gsm8k.txt", like_gsm8k, fmt="%d")
    out = answer("doctor", "gsm8k.txt", "--batch-size", "32")
    change = out.splitlines()[0]
    assert "samples_per_update=32, grouping=50); with the Trainer: dynagroup=Dyna" in change


def fits_in(memory: str, *options: str) -> str:
    samples = ["lengths.npy", "--batch-size", "8", "--max-length", "96"]
    return answer("doctor", *samples, "--model", "model", "--gpu-memory", memory, *options)


def test_doctor_advises_nothing_that_does_not_fit(folder):
    """Masks of packed samples grow with the square of all tokens."""
    model = str(folder / "model")
    packed = MemoryBudget.from_model(model, "60MB", layout="packed").max_tokens(96)
    padded = MemoryBudget.from_model(model, "60MB", layout="padded").max_tokens(96)
    out = fits_in("60MB", "--layout", "packed")
    assert f"a budget that is safe: {packed:,} tokens" in out
    assert packed < 0.9 * padded


def test_doctor_says_what_fits_and_for_which_training(folder):
    out = fits_in("80GB")
    assert "fit 80GB; up to" in out
    training = "train, float32, sdpa attention, no checkpointing"
    assert f"({training}, AdamW of 8 bytes per trained parameter)" in out


@pytest.fixture(scope="module")
def pairs_that_fit(folder) -> tuple[MemoryBudget, int, int]:
    """A budget for answers of up to 90 tokens beside questions of up to 500; and the samples and tokens that a doctor says."""
    config = models.t5(vocab=900, width=64, layers=1, heads=4, d_kv=16)
    config.save_pretrained(folder / "t5")
    np.savez(folder / "pairs.npz", source=[500, 5, 7] * 20, target=[3, 90, 4] * 20)
    options = ["--batch-size", "8", "--model", "t5", "--gpu-memory", "400MB"]
    out = answer("doctor", "pairs.npz", *options)
    pattern = r"8 samples of 500 source and 90 target fit 400MB; up to (\d+) would .* safe: ([\d,]+) tokens"
    match = re.search(pattern, out)
    assert match, out
    tokens = match[2].replace(",", "")
    budget = MemoryBudget.from_model(config, "400MB")
    return budget, int(match[1]), int(tokens)


def test_doctor_says_how_many_samples_of_all_streams_fit(pairs_that_fit):
    budget, samples, _ = pairs_that_fit
    shape = BatchShape.of([samples, samples + 1], {"tokens": 500, "target": 90})
    assert budget.fits(shape).tolist() == [True, False]


@pytest.mark.parametrize("target", [1, 45, 90])
@pytest.mark.parametrize("source", [1, 50, 500])
def test_doctor_says_how_many_tokens_of_all_streams_are_safe(pairs_that_fit, source, target):
    budget, _, tokens = pairs_that_fit
    samples = tokens // (source + target)
    shape = BatchShape.of([samples], {"tokens": source, "target": target})
    assert budget.fits(shape).all()


FSDP = partial(MemoryBudget.from_model, layout="packed", sharding="fsdp", num_ranks=8)
GENERATE = partial(MemoryBudget.from_model, mode="generate", max_new_tokens=8)
OF_2GB = ["--dtype", "bfloat16", "--gpu-memory", "2GB"]


@pytest.mark.filterwarnings("ignore:the memory of this model was fitted")
@pytest.mark.parametrize(
    ("line", "budget_of"),
    [
        ("fit model --fsdp 8 --layout packed", FSDP),
        ("fit model --mode generate --max-new-tokens 8", GENERATE),
    ],
)
def test_fit_says_what_the_budget_says(line, budget_of, folder):
    picture = folder / "new" / "fits.png"
    budget = budget_of("model", "2GB", dtype="bfloat16")
    out = answer(*line.split(), *OF_2GB, "--picture", str(picture))
    assert out.startswith(f"{budget}\nMemoryBudget.from_model(")
    code = out.splitlines()[-2]
    assert eval(code, {"MemoryBudget": MemoryBudget}) == budget
    image = picture.read_bytes()
    assert image.startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore:the memory of this model was fitted")
def test_fit_with_lora_says_what_the_budget_says(folder):
    budget = MemoryBudget.from_model("model", "2GB", dtype="bfloat16", lora=True)
    printed = figures("fit", "model", "--lora", *OF_2GB)
    samples = budget.most_samples([128, 160])
    assert printed["samples"] == samples.tolist()


@pytest.fixture(scope="module")
def packed_tokens(folder) -> int:
    budget = MemoryBudget.from_model("model", "40MB", layout="packed", attention="flash")
    return budget.max_tokens(160)


@pytest.mark.parametrize(
    ("framework", "setting"),
    [
        (
            "verl",
            "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu={T}",
        ),
        ("trl", "SFTConfig(packing=True, max_length=64, per_device_train_batch_size={N})"),
        (
            "llamafactory",
            "flash_attn=fa2 neat_packing=true cutoff_len=64 per_device_train_batch_size={N}",
        ),
        (
            "nemo",
            "policy.sequence_packing.enabled=true policy.sequence_packing.train_mb_tokens={T}",
        ),
        ("megatron", "--sequence-packing-scheduler dp_balanced --max-seqlen-per-dp-cp-rank {T}"),
    ],
)
def test_fit_prints_the_setting_of_a_framework_from_the_same_trace(
    framework, setting, packed_tokens
):
    assert packed_tokens > 128
    options = ["--gpu-memory", "40MB", "--for", framework, "--max-length", "64"]
    out = answer("fit", "model", *options)
    last = out.splitlines()[-1]
    expected = setting.format(T=packed_tokens, N=packed_tokens // 64)
    assert last.endswith(expected)


def test_python_m_dynagroup_runs():
    command = [sys.executable, "-m", "dynagroup", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    for name in ("plan", "fit", "demo"):
        assert name in shown.stdout


def test_the_version_is_that_of_the_package():
    assert run("--version") == (0, f"dynagroup {dynagroup.__version__}\n", "")


@pytest.mark.parametrize(
    "line", ["", "plan", "plan lengths.npy", "doctor lengths.npy", "fit", "plan --what", "x"]
)
def test_missing_or_unknown_arguments_are_one_line(line, folder):
    result = run(*line.split())
    assert result.status == 2
    assert result.error.count("\n") == 1
    assert result.error.startswith("dynagroup")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan lengths.npy --max-tokens=16kk", "such as 16384 or 16k"),
        ("plan lengths.npy --max-tokens -8", "`max_tokens` must be"),
        ("plan lengths.npy --max-tokens 800 --picture a.nothing", "must end in one of"),
        (
            "fit model --gpu-memory 2GB --for trl --mode forward",
            "needs `--mode train`, but `--mode` is forward",
        ),
        (
            "fit model --gpu-memory 6MB --for trl --max-length 2k",
            "`--max-length` is 2048, but a packed batch may have only",
        ),
        ("fit model --gpu-memory lots", "80GB or 24GiB, or a number of bytes, but is 'lots'"),
        ("fit model --gpu-memory 24GB --measure", "needs a CUDA device"),
        ("doctor lengths.npy --batch-size 8 --gpu-memory 24GB", "`--gpu-memory` needs `--model`"),
        ("doctor lengths.npy --batch-size 8 --model nosuch", "no config found for 'nosuch'"),
        ("demo --texts nowhere.txt", "No such file"),
        ("demo --texts bytes.txt", "can't decode byte"),
        ("demo --texts texts.txt", "at least 4 texts, but got 2"),
        ("demo --texts many.txt --model nosuch", "We couldn't connect"),
        ("demo --texts many.txt --samples 0", "`samples` must be"),
    ],
)
def test_mistakes_of_every_command_are_one_line(line, message, folder):
    assert message in refusal(*line.split(" "))


@pytest.mark.parametrize("model", NO_MODELS)
def test_what_is_no_model_is_told_in_one_line(model, folder):
    error = refusal("fit", model, "--gpu-memory", "24GB")
    assert f"dynagroup fit: no config found for {model!r}" in error


def test_a_missing_package_is_named_with_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = refusal(*PLAN, "--max-tokens", "800", "--picture", "x.png")
    assert "install dynagroup[viz]" in error

"""The command line says what the library says, and a user's mistake in one line; never a traceback."""

import contextlib
import io
import json
import re
import subprocess
import sys
import warnings

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

LENGTHS = np.random.default_rng(0).integers(1, 100, 200).astype(np.int32)
CHATS = b'{"c": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}\n'
TOKENIZED = ["--tokenizer", "tokens"]
NO_MODELS = ["unknown", "cut_off", "empty", "no/such/model", "lengths.npy", "", "\0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where commands run: lengths, texts, a table, a tokenizer, a model, and what is none of them; no hub."""
    path = tmp_path_factory.mktemp("cli")
    np.save(path / "lengths.npy", LENGTHS)
    (path / "texts.txt").write_text("some text\nmore of it\n")
    (path / "many.txt").write_text("one text\n" * 8)
    (path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    train_tokenizer(
        ["a few words to learn from, and some more"] * 4, vocabulary=300
    ).save_pretrained(path / "tokens")
    own = {"n_positions": 160, "bos_token_id": None, "eos_token_id": None}
    models.gpt2(vocab=500, width=64, layers=1, dropout=0.1, **own).save_pretrained(path / "model")
    for name, config in (
        ("unknown", '{"model_type": "nosuch"}'),
        ("cut_off", '{"model_type": '),
        ("empty", None),
    ):
        (path / name).mkdir()
        if config is not None:
            (path / name / "config.json").write_text(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.chdir(path)
        yield path


def said(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of one command, in this process."""
    out, error = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stderr(error),
        contextlib.redirect_stdout(out),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        try:
            status = main(arguments)
        except SystemExit as stopped:  # argparse's own refusal
            status = int(stopped.code or 0)
    return status, out.getvalue(), error.getvalue()


def answer(*arguments: str) -> str:
    status, out, error = said(*arguments)
    assert status == 0, error
    return out


def figures(*arguments: str):
    return json.loads(answer(*arguments, "--json"))


def refusal(*arguments: str) -> str:
    status, _, error = said(*arguments)
    assert (status, error.count("\n")) == (2, 1), error
    assert error.startswith(f"dynagroup {arguments[0]}: ")
    return error


# The tests run where the commands do, so both predict for this machine's device.
COUNTED = f"200 rows, {int(LENGTHS.sum()):,} tokens in all, the longest {int(LENGTHS.max()):,}"
DEVICE = f"time is predicted for {local_device()}, this machine; for another: --device cuda or --device cpu"


def plan_of(lengths, max_tokens: int, **options) -> BatchPlan:
    how = {"rank": 0, "world_size": 1, **options}
    return LengthAwareBatchSampler(lengths, TokenBudget(max_tokens), **how).plan


def write(path, kind, columns):
    table = Dataset.from_dict(columns)
    if kind == "npy":
        np.save(path, columns["tokens"])
    elif kind == "txt":
        np.savetxt(path, columns["tokens"], fmt="%d")
    elif kind == "npz":
        np.savez(
            path,
            **{name: values for name, values in columns.items() if not isinstance(values[0], str)},
        )
    elif kind == "json":
        path.write_text(json.dumps(table.to_list()))
    elif kind in ("csv", "tsv"):
        table.to_csv(str(path), index=False, sep="," if kind == "csv" else "\t")
    elif kind == "saved":
        DatasetDict({"train": table}).save_to_disk(str(path))
    else:
        {"jsonl": table.to_json, "parquet": table.to_parquet}[kind](str(path))


@pytest.mark.parametrize(
    "kind", ["npy", "npz", "txt", "csv", "tsv", "jsonl", "json", "parquet", "saved"]
)
def test_lengths_come_in_several_kinds_of_files(tmp_path, kind):
    """As users have them: bare, beside other columns, or as the ids themselves."""
    path, bare = tmp_path / (f"lengths.{kind}" if kind != "saved" else kind), {"tokens": LENGTHS}
    named = {"name": ["a"] * 200, "length": LENGTHS}
    own = {**dict.fromkeys(("npy", "npz", "txt"), bare), "csv": named, "tsv": named}
    write(
        path,
        kind,
        own.get(kind, {"input_ids": [[7] * int(n) for n in LENGTHS], "label": [0] * 200}),
    )
    found = figures("plan", str(path), "--max-tokens", "1k", "--max-length", "50")
    assert found["real_tokens"] == int(np.minimum(LENGTHS, 50).sum())


@pytest.mark.parametrize("kind", ["npz", "csv", "json", "parquet", "saved"])
def test_streams_are_the_columns_that_were_named_and_the_output_says_which(tmp_path, kind):
    path, target = tmp_path / (f"pairs.{kind}" if kind != "saved" else kind), LENGTHS[::-1]
    columns = {"name": ["x"] * 200, "source": LENGTHS.tolist(), "target": target.tolist()}
    write(
        path,
        kind,
        {**columns, "chars": (4 * LENGTHS).tolist(), "odd": (kinds := LENGTHS % 2).tolist()},
    )
    first, report = answer(
        "plan", str(path), "--column", "source,target", "--max-tokens", "800"
    ).split("\n", 1)
    assert first.startswith("streams: source, target (")
    expected = plan_of({"source": LENGTHS, "target": target}, 800).report()
    counted = f"{COUNTED.replace('tokens', 'source')}\n{COUNTED.replace('tokens', 'target')}"
    assert report == f"{expected}\n{counted}\n{DEVICE}\n"
    one = answer(
        "plan", str(path), "--column", "source", "--kinds", "odd", "--max-tokens", "800"
    )  # of no streams
    assert one == f"{plan_of(LENGTHS, 800, kinds=kinds).report()}\n{COUNTED}\n{DEVICE}\n"
    if kind == "npz":  # all of them, if none was chosen; beside JSON it is told on standard error
        status, out, error = said("compare", str(path), "--batch-size", "8", "--json")
        assert (status, error.split("(")[0]) == (0, "streams: source, target, chars, odd ")
        assert json.loads(out)


def npy(array) -> bytes:
    np.save(file := io.BytesIO(), array)
    return file.getvalue()


def zipped(**arrays) -> bytes:
    np.savez(file := io.BytesIO(), **arrays)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "arguments", "message"),
    [
        ("x.npy", b"no array", [], "cannot be read in the format of its ending"),
        (
            "x.npy",
            npy([[3, 4], [5, 6]]),
            [],
            "one number per sample, but is an array of shape (2, 2)",
        ),
        (
            "x.npy",
            npy(5),
            [],
            "must be one number per sample, but is an array of shape ()",
        ),
        ("x.npz", zipped(a=[3, 4], b=[5]), [], "{'a': 2, 'b': 1} samples"),
        (
            "x.npz",
            zipped(a=[3, 4], b=5),
            ["--column", "a", "--kinds", "b"],
            "`kinds` has 1 labels for 2 lengths",
        ),
        ("x.npz", zipped(), [], "'x.npz' has no samples"),
        ("x.txt", b"\xff\xfe\x00", [], "cannot be read in the format of its ending"),
        ("x.txt", b"", [], "'x.txt' has no samples"),
        ("x.fasta", b"\n", ["--length-of", "characters"], "'x.fasta' has no samples"),
        ("x.csv", b"length\n", [], "'x.csv' has no samples"),
        ("x.txt", b"3\n-4\n", [], "must be a whole number from 0"),
        (
            "x.txt",
            b"some text",
            ["--tokenizer", "no/such/tokenizer/here"],
            "no/such/tokenizer/here",
        ),
        ("x.csv", b"a,b\n1,2\n", [], "columns ['a', 'b']; choose one with `--column A`"),
        ("x.csv", b"a,length\n1,2\n3,4,5\n", [], "saw 3"),
        ("x.csv", b'a,length\n1,"2\n3,4\n', [], "cannot be read in the format of its ending"),
        (
            "x.jsonl",
            CHATS,
            ["--column", "c", *TOKENIZED],
            "`tokenizer` has no chat template; set tokenizer.chat_template",
        ),
        (
            "x.jsonl",
            b'{"length": 3}\n{"length": \n',
            [],
            "cannot be read in the format of its ending",
        ),
        ("x.docx", b"", [], "has an unknown file ending"),
        ("empty", None, [], "cannot be read in the format of its ending"),
    ],
)
def test_a_wrong_file_is_one_line(folder, name, content, arguments, message):
    if content is not None:
        (folder / name).write_bytes(content)
    assert message in refusal("plan", name, "--max-tokens", "8", *arguments)


def test_a_mark_of_utf_8_is_no_part_of_a_text(tmp_path, folder):
    (tmp_path / "x.txt").write_text("one two\nfour\n", encoding="utf-8-sig")
    (tmp_path / "y.txt").write_text("one two\nfour\n", encoding="utf-8")
    of = [
        figures("plan", str(tmp_path / name), "--max-tokens", "80", *TOKENIZED)
        for name in ("x.txt", "y.txt")
    ]
    assert of[0]["num_samples"] == 2
    assert of[0]["real_tokens"] == of[1]["real_tokens"]


def test_plan_says_what_the_plan_says(folder):
    arguments = ["plan", "lengths.npy", "--max-tokens", "800"]
    picture = folder / "a new folder" / "plan.png"
    shown = answer(*arguments, "--world-size", "4", "--picture", str(picture))
    report = plan_of(LENGTHS, 800, world_size=4).report()
    assert shown == f"{report}\n{COUNTED}\n{DEVICE}\npicture: {picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert figures(*arguments, "--shuffle", "--samples-per-update", "32")["num_updates"] == 7
    for text, tokens in (("16k", 16384), ("16_384", 16384)):
        found = figures("plan", "lengths.npy", "--max-tokens", text)["fingerprint"]
        assert found == plan_of(LENGTHS, tokens).fingerprint


def test_compare_says_what_compare_says(folder):
    picture = folder / "new" / "compare.png"
    arguments = ["compare", "lengths.npy", "--batch-size", "8", "--world-size", "2"]
    report = compare(LENGTHS, 8, world_size=2).report()
    said = f"{report}\n{COUNTED}\n{DEVICE}\npicture: {picture}\n"
    assert answer(*arguments, "--picture", str(picture)) == said
    work = Work.of(AutoConfig.from_pretrained(folder / "model"), device=local_device())
    printed = figures(*arguments, "--model", "model")
    assert printed.pop("counts")["tokens"]["num_samples"] == len(LENGTHS)
    assert printed == compare(LENGTHS, 8, world_size=2, work=work).figures()


def test_doctor_says_what_is_wrong_and_what_to_change_and_advises_nothing_that_does_not_pay_or_fit(
    folder,
):
    lines = answer("doctor", "lengths.npy", "--batch-size", "8", "--world-size", "4").splitlines()
    found = compare(LENGTHS, 8, world_size=4)
    assert lines[5:] == [*found.report().splitlines(), COUNTED, DEVICE]
    change, waste, ranks, _ = lines[:4]
    assert [line.split()[0] for line in lines[:4]] == ["change", "waste", "ranks", "memory"]
    assert f"{found.ways[0].padding:.0%} of the tokens" in waste
    assert f"{found.ways[0].waiting:.0%} of their time" in ranks
    assert f"TokenBudget({8 * LENGTHS.max()}), samples_per_update=32" in change
    (folder / "equal.txt").write_text("64\n" * 200)
    page = folder / "doctor.html"
    arguments = ["doctor", "equal.txt", "--batch-size", "8", "--html", str(page)]
    assert "nothing: other batches of the same updates" in answer(*arguments)
    assert "group_by_length 8" in page.read_text(encoding="utf-8")
    like_gsm8k = np.random.default_rng(0).lognormal(5, 0.35, 3200).astype(int)
    (folder / "many.txt").write_text("".join(f"{length}\n" for length in like_gsm8k))
    change = answer("doctor", "many.txt", "--batch-size", "32").splitlines()[0]
    assert "samples_per_update=32, grouping=50); with the Trainer: dynagroup=Dyna" in change
    arguments = [
        "doctor",
        "lengths.npy",
        "--batch-size",
        "8",
        "--max-length",
        "96",
        "--model",
        "model",
        "--gpu-memory",
    ]
    shown = answer(
        *arguments, "60MB", "--layout", "packed"
    )  # masks of packed samples grow with the square of all tokens
    budget, padded = (
        MemoryBudget.from_model(str(folder / "model"), "60MB", layout=name)
        for name in ("packed", "padded")
    )
    assert f"a budget that is safe: {budget.max_tokens(96):,} tokens" in shown
    assert budget.max_tokens(96) < 0.9 * padded.max_tokens(96)
    assert "fit 80GB; up to" in (shown := answer(*arguments, "80GB"))
    assert (
        "(train, float32, sdpa attention, no checkpointing, AdamW of 8 bytes per trained parameter)"
        in shown
    )


def test_doctor_asks_about_all_streams(folder):
    """Answers of up to 90 tokens beside questions of up to 500: what fits is what the memory budget lets fit."""
    config = models.t5(vocab=900, width=64, layers=1, heads=4, d_kv=16)
    config.save_pretrained(folder / "t5")
    np.savez(folder / "pairs.npz", source=[500, 5, 7] * 20, target=[3, 90, 4] * 20)
    out = answer(
        "doctor", "pairs.npz", "--batch-size", "8", "--model", "t5", "--gpu-memory", "400MB"
    )
    found = re.search(
        r"8 samples of 500 source and 90 target fit 400MB; up to (\d+) would .* safe: ([\d,]+) tokens",
        out,
    )
    assert found, out
    most, tokens = int(found[1]), int(found[2].replace(",", ""))
    budget = MemoryBudget.from_model(config, "400MB")
    assert budget.fits(BatchShape.of([most, most + 1], {"tokens": 500, "target": 90})).tolist() == [
        True,
        False,
    ]
    counts, source, target = np.array(
        [[tokens // (s + t), s, t] for s in (1, 50, 500) for t in (1, 45, 90)]
    ).T
    assert budget.fits(BatchShape.of(counts, {"tokens": source, "target": target})).all()


@pytest.mark.filterwarnings("ignore:the memory of this model was fitted")
@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "fit model --fsdp 8 --layout packed",
            {"layout": "packed", "sharding": "fsdp", "num_ranks": 8},
        ),
        (
            "profile model --mode generate --max-new-tokens 8",
            {"mode": "generate", "max_new_tokens": 8},
        ),
        ("fit model --lora", {"lora": True}),
    ],
)
def test_fit_and_profile_say_what_the_budget_says(line, told, folder):
    arguments, picture = (
        [*line.split(), *"--dtype bfloat16 --gpu-memory 2GB".split()],
        folder / "new" / "fits.png",
    )
    budget = MemoryBudget.from_model("model", "2GB", dtype="bfloat16", **told)
    if "lora" in told:
        assert figures(*arguments)["samples"] == budget.most_samples([128, 160]).tolist()
        return
    said = answer(*arguments, "--picture", str(picture))
    assert said.startswith(f"{budget}\nMemoryBudget.from_model(")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert eval(said.splitlines()[-2], {"MemoryBudget": MemoryBudget}) == budget


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
def test_fit_prints_the_setting_of_a_framework_from_the_same_trace(framework, setting, folder):
    arguments = ["fit", "model", "--gpu-memory", "40MB", "--for", framework, "--max-length", "64"]
    most = MemoryBudget.from_model("model", "40MB", layout="packed", attention="flash").max_tokens(
        160
    )
    assert answer(*arguments).splitlines()[-1].endswith(setting.format(T=most, N=most // 64))
    assert most > 128


def test_python_m_dynagroup_runs_and_missing_or_unknown_arguments_are_one_line(folder):
    shown = subprocess.run(
        [sys.executable, "-m", "dynagroup", "--help"], capture_output=True, text=True, check=True
    )
    assert all(command in shown.stdout for command in ("plan", "profile", "demo"))
    assert said("--version") == (0, f"dynagroup {dynagroup.__version__}\n", "")
    for line in ("", "plan", "plan lengths.npy", "doctor lengths.npy", "fit", "plan --what", "x"):
        status, _, error = said(*line.split())
        assert (status, error.count("\n"), error[:9]) == (2, 1, "dynagroup"), line


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
        ("profile model --gpu-memory lots", "80GB or 24GiB, or a number of bytes, but is 'lots'"),
        ("profile model --gpu-memory 24GB --measure", "needs a CUDA device"),
        ("doctor lengths.npy --batch-size 8 --gpu-memory 24GB", "`--gpu-memory` needs `--model`"),
        ("doctor lengths.npy --batch-size 8 --model nosuch", "no config found for 'nosuch'"),
        ("demo --texts nowhere.txt", "No such file"),
        ("demo --texts bytes.txt", "can't decode byte"),
        ("demo --texts texts.txt", "at least 4 texts, but got 2"),
        ("demo --texts many.txt --model nosuch", "We couldn't connect"),
        ("demo --texts many.txt --samples 0", "`samples` must be"),
        *(
            (f"fit {model} --gpu-memory 24GB", f"dynagroup fit: no config found for {model!r}")
            for model in NO_MODELS
        ),
    ],
)
def test_mistakes_of_every_command_are_one_line(line, message, folder):
    assert message in refusal(*line.split(" "))


def test_a_missing_package_is_named_with_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "install dynagroup[viz]" in refusal(
        "plan", "lengths.npy", "--max-tokens", "800", "--picture", "x.png"
    )

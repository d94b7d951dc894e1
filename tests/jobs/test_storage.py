"""A journal's whole records count, whatever happens to it; jobs whose results may differ have other identities."""

import multiprocessing
import os
import resource
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.errors import ConfigError, StateError
from dynagroup.jobs.formats import JSON_LINES, VECTORS
from dynagroup.jobs.identity import identity_of_model, identity_of_texts
from dynagroup.jobs.storage import Output
from tests.models import TEXTS, adapted, small_llama, small_tokenizer

JOB = {"task": "test", "texts": 4}
RESULTS = ["zero", "eins\u2028", "", ["\0", "\n"]]
TWENTY = [f"result {i}" for i in range(20)]
RECEIPTS = [b"", b"\xff", b"null", b"{}", b"[" * 99999, b'{"job": 3, "bytes": 4, "checksum": 5}']
DAMAGES = [
    "cut",
    "zeros to the end",
    "a flipped bit",
    "a byte more",
    "a byte less",
    "other lines",
    "twice",
]


def damaged(kind: str, data: bytes, at: int) -> bytes:
    before = data[:at]
    if kind == "cut":
        return before
    if kind == "zeros to the end":
        return before.ljust(len(data), b"\0")
    if kind == "a flipped bit":
        return before + bytes([data[at] ^ 4]) + data[at + 1 :]
    if kind == "a byte more":
        return before + b"x" + data[at:]
    if kind == "a byte less":
        return before + data[at + 1 :]
    if kind == "other lines":
        return before + b'{"index": 0, "result": "wrong"}\n' * 3
    assert kind == "twice"
    return data + data[at:]


def out_of(folder: Path, job: Any = JOB) -> Output:
    return Output(folder / "out.jsonl", job, 4, JSON_LINES)


def written(folder: Path, indices: list[int]) -> Path:
    """One run's journal; these samples were finished in it."""
    with closing(out := out_of(folder)):
        before = {*out.journal.glob("*")}
        out.claim()
        for index in indices:
            out.append([index], [RESULTS[index]])
        return next(iter({*out.journal.glob("*")} - before), out.journal)


def test_a_disk_that_is_full_in_the_last_bytes_is_an_error(tmp_path: Path) -> None:
    """numpy writes to a real file through a buffer of its own, whose loss nobody reports."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with (
            pytest.raises(OSError, match="File too large"),
            (tmp_path / "x.npy").open("wb") as file,
        ):
            VECTORS.write([file], np.zeros((1, 1000), np.float32))
        with pytest.raises(OSError, match="File too large") as kept:  # as a notebook keeps it
            run(tmp_path, [], ["x" * 3000] * 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kept.value
    assert run(tmp_path, [], ["x" * 3000] * 4) == ["x" * 3000] * 4, "the lock was released"


def run(folder: Path, done: list[int], results: list[Any] = TWENTY) -> Any:
    """A job of so many samples in batches of three; ``done`` is what was worked on."""
    out = Output(folder / "out.jsonl", {**JOB, "texts": len(results)}, len(results), JSON_LINES)
    if not out.is_finished():
        with closing(out):
            if not out.claim():
                missing = np.flatnonzero(~out.finished().are_finished).tolist()
                for batch in (missing[i : i + 3] for i in range(0, len(missing), 3)):
                    done += batch
                    out.append(batch, [results[i] for i in batch])
                out.publish()
    out.clear()
    return out.read()


def test_what_was_written_comes_back_and_a_job_that_finished_nothing_is_in_nobodys_way(
    tmp_path: Path,
) -> None:
    with closing(other := out_of(tmp_path, {"task": "another"})):
        other.claim()
    written(tmp_path, [3, 1])
    written(tmp_path, [0, 2])
    assert run(tmp_path, done := [], RESULTS) == RESULTS
    assert not done
    assert (
        len((tmp_path / "out.jsonl").read_text().splitlines()) == 4
    )  # whatever a reader splits at


def test_another_jobs_journal_is_refused_with_what_differs_and_never_read(tmp_path: Path) -> None:
    written(tmp_path, [1])
    said = r"out.jsonl.job .* saved by a run with other data or settings: texts was 4 then, is 5 now.*remove"
    with (
        closing(other := out_of(tmp_path, {**JOB, "texts": 5})),
        pytest.raises(StateError, match=said),
    ):
        other.claim()
    (tmp_path / "out.jsonl.job").unlink()
    with closing(other):
        other.claim()
        assert not other.finished().are_finished.any()


@settings(max_examples=100)
@given(st.sampled_from(DAMAGES), st.floats(0, 1, exclude_max=True))
def test_no_damage_gives_a_wrong_result(tmp_path_factory: Any, kind: str, place: float) -> None:
    folder = tmp_path_factory.mktemp("journal")
    path = written(folder, [2, 0, 3, 1])
    data = path.read_bytes()
    at = int(place * len(data))
    path.write_bytes(damaged(kind, data, at))
    assert run(folder, [], RESULTS) == RESULTS


def test_a_torn_record_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, [1, 2, 3])
    os.truncate(path, path.stat().st_size - 2)
    assert out_of(tmp_path).finished().are_finished.tolist() == [False, True, True, False]
    assert "the last 30 of 76 bytes" in caplog.text


def test_two_runs_of_one_job_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the first publishes: its lock is given back once the output is there."""
    first = out_of(tmp_path)
    second = out_of(tmp_path)
    replace = os.replace

    def refused(*names: Path) -> None:
        with (
            closing(second),
            pytest.raises(ConfigError, match="out.jsonl.job is locked: another process"),
        ):
            second.claim()
        if names:
            replace(*names)

    first.claim()
    first.append([0], [RESULTS[0]])
    refused()
    first.append([1, 2, 3], RESULTS[1:])
    monkeypatch.setattr(os, "replace", refused)
    first.publish()
    first.close()
    assert second.claim()
    second.close()


def test_a_worker_that_outlives_its_run_does_not_keep_the_lock(tmp_path: Path) -> None:
    """The run gives the lock back for both; only after ``kill -9`` do others wait until the worker has ended."""
    forks = multiprocessing.get_context("fork")
    killed = out_of(tmp_path)
    next_run = out_of(tmp_path)
    runs = forks.Event()
    ended = forks.Event()
    killed.claim()
    worker = forks.Process(target=lambda: (runs.set(), ended.wait(60)))
    worker.start()
    assert runs.wait(60)
    killed.close()
    with closing(next_run):
        assert not next_run.claim()
    ended.set()
    worker.join()


class Crash(BaseException):
    """The process ends here."""


def crashing(monkeypatch: pytest.MonkeyPatch, operation: int) -> None:
    """Ends the process before its n-th operation on files. (What half a write leaves is told above.)"""
    left = [operation]

    def before(act: Any) -> Any:
        def acting(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Crash
            return act(*args, **kwargs)

        return acting

    for name in ("fsync", "open", "replace"):
        monkeypatch.setattr(os, name, before(getattr(os, name)))
    for name in ("unlink", "rmdir", "open"):
        monkeypatch.setattr(Path, name, before(getattr(Path, name)))


def test_a_crash_at_any_operation_loses_nothing_and_repeats_at_most_the_batch_it_was_in(
    tmp_path: Path,
) -> None:
    for operation in range(1, 40):
        folder = tmp_path / str(operation)
        folder.mkdir()
        done: list[int] = []
        # The run after the crash crashes at its own operation of that number.
        for _ in range(2):
            with pytest.MonkeyPatch.context() as patched, suppress(Crash):
                crashing(patched, operation)
                run(folder, done)
        assert run(folder, done) == TWENTY
        assert set(done) == set(range(20))
        assert len(done) <= 20 + 2 * 3
        assert sorted(p.name for p in folder.iterdir()) == ["out.jsonl", "out.jsonl.job"]


def test_vectors_are_kept_in_four_bytes_a_number_and_published_whole(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 1000), dtype=np.float32)
    with closing(out := Output(tmp_path / "v.npy", JOB, 3, VECTORS)):
        out.claim()
        out.append([2, 0], rows[[2, 0]])
        with pytest.raises(
            StateError, match="1 of 3 samples are missing in .*v.npy.journal; run again"
        ):
            out.publish()
        out.append([1], rows[[1]])
        assert sum(p.stat().st_size for p in out.journal.iterdir()) < rows.nbytes + 200
        out.publish()
    np.testing.assert_array_equal(out.read(), rows)
    assert out.read().dtype == np.float32


def test_a_receipt_that_is_damaged_or_an_output_that_is_a_folder_is_an_error_that_names_it(
    tmp_path: Path,
) -> None:
    run(tmp_path, [])
    out = Output(tmp_path / "out.jsonl", {**JOB, "texts": 20}, 20, JSON_LINES)
    for damaged in RECEIPTS:
        (tmp_path / "out.jsonl.job").write_bytes(damaged)
        with pytest.raises(
            StateError, match="out.jsonl.job was written by another job: .* remove .* to start over"
        ):
            out.is_finished()
    (tmp_path / "out.jsonl").unlink()
    (tmp_path / "out.jsonl").mkdir()
    with pytest.raises(ConfigError, match="out.jsonl exists, but"):
        out.is_finished()


class Processor(transformers.LogitsProcessor):
    """An argument whose default representation holds an address."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def identity_of(
    model: Any, tokenizer: Any, texts: Any, settings: Any, told: Any = None
) -> dict[str, Any]:
    return identity_of_model(model) | identity_of_texts(tokenizer, texts, settings, told)


def identity(
    model=None, tokenizer=None, texts: Any = TEXTS, token: int = 3, **more: Any
) -> dict[str, Any]:
    arguments = {"logits_processor": transformers.LogitsProcessorList([Processor(token)]), **more}
    settings = {"task": "generate", "max_length": None, "arguments": arguments}
    return identity_of(model or small_llama(), tokenizer or small_tokenizer(), texts, settings)


@pytest.fixture(scope="module")
def first() -> dict[str, Any]:
    return identity()


def differing(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert first.keys() == other.keys()
    return [name for name in first if first[name] != other[name]]


def test_other_texts_are_noticed(first: Any) -> None:
    moved = [TEXTS[0] + TEXTS[1][:1], TEXTS[1][1:], *TEXTS[2:]]
    assert differing(first, identity(texts=moved)) == ["texts"]
    assert differing(first, identity(texts=TEXTS[::-1])) == ["texts"]
    assert identity(texts=["\ud800"]) != identity(texts=["\ud801"])


def test_other_arguments_are_noticed(first: Any) -> None:
    assert differing(first, identity(token=4)) == ["arguments"]
    two_beams = identity(generation_config=transformers.GenerationConfig(num_beams=2))
    three_beams = identity(generation_config=transformers.GenerationConfig(num_beams=3))
    assert differing(first, two_beams) == ["arguments"]
    assert differing(two_beams, three_beams) == ["arguments"]


def test_another_tokenizer_is_noticed(first: Any) -> None:
    tokenizer = small_tokenizer()
    tokenizer.add_tokens(["w1 w2"])
    assert differing(first, identity(tokenizer=tokenizer)) == ["tokenizer"]


def test_use_of_a_model_and_a_tokenizer_is_no_matter(first: Any, tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    tokenizer(TEXTS, truncation=True, max_length=3, padding=True)
    model = small_llama()
    model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3)
    model.train()
    model.save_pretrained(tmp_path)
    model.config._name_or_path = "elsewhere"
    model.generation_config.transformers_version = "9.9"
    assert identity(model, tokenizer) == first


def swap(model: Any) -> None:
    rows = model.model.layers[1].mlp.up_proj.weight
    rows[[0, 1]] = rows[[1, 0]]


def scale_one(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[-1, -1].mul_(1.0001)


def add_buffer(model: Any) -> None:
    model.model.register_buffer("scale", torch.ones(2))


def set_beams(model: Any) -> None:
    model.generation_config.num_beams = 3


def set_epsilon(model: Any) -> None:
    model.config.rms_norm_eps = 1e-3


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (swap, "model"),
        (scale_one, "model"),
        (add_buffer, "model"),
        (set_beams, "model's generation_config"),
        (set_epsilon, "model's config"),
    ],
)
def test_another_model_is_noticed(change: Any, name: str, first: Any) -> None:
    model = small_llama()
    with torch.no_grad():
        change(model)
    assert differing(first, identity(model)) == [name]


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)  # of torch.ao.quantization
def test_quantized_weights_are_told_apart() -> None:
    quantized = []
    for change in (0.0, 0.0, 0.5):
        model = small_llama()
        model.model.layers[1].mlp.up_proj.weight.data += change
        dynamic = torch.ao.quantization.quantize_dynamic(
            model, {torch.nn.Linear}, dtype=torch.qint8
        )
        quantized.append(identity(dynamic))
    assert quantized[0] == quantized[1]
    assert differing(quantized[0], quantized[2]) == ["model"]


def test_code_and_switches_are_the_users_to_tell(first) -> None:
    model = small_llama()
    model.set_attn_implementation("eager")
    model.model.layers[1].mlp.act_fn = torch.nn.Tanh()
    assert identity(model) == first
    settings = {"task": "embed"}
    untold = identity_of(model, small_tokenizer(), TEXTS, settings)
    told = identity_of(model, small_tokenizer(), TEXTS, settings, "tanh")
    assert differing(untold, told) == ["identity"]


def checksum(tensor: torch.Tensor) -> str:
    model = torch.nn.Module()
    model.register_buffer("table", tensor)
    return identity_of(model, small_tokenizer(), [], {})["model"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float64", "complex64", "bool"])
def test_large_weights_are_told_apart_by_checksums_also_when_rows_change_places(dtype: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(1000, 512).mul(50).clamp(min=0)
    table = values.to(getattr(torch, dtype))
    changed = table.clone()
    swapped = table.clone()
    swapped[[3, 500]] = table[[500, 3]]
    others = [table, changed, swapped, table.T]
    if dtype == "bool":
        changed[777, 7] = ~table[777, 7]
    else:
        changed[777, 7] = 1 - table[777, 7]
        others.append(-table)
    checksums = {checksum(other) for other in others}
    assert len(checksums) == len(others)
    assert checksum(table.clone()) == checksum(table)


def test_weights_of_adapters_are_noticed() -> None:
    lora = pytest.importorskip("peft").LoraConfig(
        r=2, target_modules=["q_proj"], init_lora_weights=False
    )
    model = adapted(small_llama(), lora, "first", "second")
    before = identity(model)
    model.register_forward_pre_hook(lambda *args: None)
    assert identity(model) == before
    model.merge_adapter()
    assert differing(before, identity(model)) == ["model"]

"""The worker's side: samples are measured, cut, collated and packed for their way to the main process."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from dynagroup import (
    BudgetError,
    ConfigError,
    OnlineDataLoader,
    RefinementCollator,
    TokenBudget,
    collated_length,
)
from dynagroup.online.collator import measure_sample
from dynagroup.online.messages import pack_tensors, unpack_tensors
from dynagroup.testing import assert_conserves
from tests.online.helpers import collate, collate_packed

PAIRS = np.random.default_rng(0).lognormal(3, 0.8, (300, 2)).clip(1, 200).astype(int).tolist()


def samples(*lengths: int) -> list[dict[str, torch.Tensor]]:
    return [
        {name: torch.ones(n, dtype=torch.int64) for name in ("input_ids", "labels")}
        for n in lengths
    ]


def refining(
    collate_fn: Any = collate, max_tokens: int = 100, length_of: Any = None, **options: Any
) -> Any:
    layout = options.pop("layout", "padded")
    return RefinementCollator(
        collate_fn, TokenBudget(max_tokens, layout=layout), length_of, **options
    )


def padded_by(extra: int) -> Any:
    return lambda batch: {
        k: torch.nn.functional.pad(v, (0, extra)) for k, v in collate(batch).items()
    }


def longer_packed(batch: list[Any]) -> Any:
    """Packs, with two tokens more in front of every sample."""
    return collate_packed(
        [{name: torch.cat([ids[:2], ids]) for name, ids in sample.items()} for sample in batch]
    )


def test_a_batch_that_is_collated_twice_is_made_of_the_samples_that_came() -> None:
    """Also where the collate function puts 9, 8 for each 9, and gives its samples the new ids."""

    def expanded(batch: list[Any]) -> Any:
        for sample in batch:
            sample["input_ids"] = torch.tensor(
                [t for i in sample["input_ids"].tolist() for t in ([9, 8] if i == 9 else [i])]
            )
        return collate([{"labels": sample["input_ids"], **sample} for sample in batch])

    refine = refining(expanded, max_tokens=8, weigh="samples")
    window = [{"input_ids": torch.tensor(ids)} for ids in ([1, 9, 9], [4, 5])]
    with pytest.warns(UserWarning, match="5 tokens per row.*collated_length"):
        batches = list(refine(window))
    assert [batch.batch["input_ids"].tolist() for batch in batches] == [[[1, 9, 8, 9, 8]], [[4, 5]]]
    assert [batch.lengths["tokens"].tolist() for batch in batches] == [[5], [2]]
    assert window[0]["input_ids"].tolist() == [1, 9, 9]


def from_text(batch: list[Any]) -> Any:
    """Tokenizes in the collate function, takes the text out of the samples, and puts five tokens in front."""
    return collate(samples(*(5 + len(sample.pop("text")) for sample in batch)))


def failing(batch: Any) -> Any:
    raise ValueError("no such token")


def ids_of(sample: Any) -> int:
    return len(sample["input_ids"])


class Raw:
    """Texts that nobody has tokenized."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return {"text": "x" * (1 + 7 * index % 30)}


IDS = samples(*range(1, 61))


def test_batches_that_fit_are_left_alone_others_are_cut_and_what_does_not_fit_comes_alone_or_is_refused() -> (
    None
):
    assert [r.indices for r in refining(max_tokens=20)(samples(4, 5, 3))] == [[0, 1, 2]]
    assert [r.indices for r in refining(max_tokens=20)(samples(9, 5, 3))] == [[1, 2], [0]], (
        "10 + 9 tokens, not 18 + 3; the most work first"
    )
    window = refining(max_tokens=5)(samples(3, 9, 2))
    assert [(r.indices, r.oversize) for r in window] == [([1], True), ([0], False), ([2], False)]
    with pytest.raises(BudgetError, match=r"sample 1 \(9 tokens\)"):
        refining(max_tokens=5, oversize="error")(samples(3, 9, 2))
    loader = OnlineDataLoader(samples(300, 4, 400), TokenBudget(64), collate_fn=collate)
    with pytest.warns(UserWarning, match="does not fit the budget even alone") as caught:
        assert sorted(tuple(step.indices) for step in loader) == [(0,), (1,), (2,)]
    assert (len(caught), loader.stats.oversize) == (1, 2)


def test_lengths_must_be_counts_of_int32_and_padded_samples_are_measured_by_their_mask() -> None:
    """What is longer would wrap to a small number, and fit."""
    for bad in (-1, 2.5, None, True, 2**31):
        with pytest.raises(ConfigError, match=f"length_of.*{2**31 - 1}.*{bad}"):
            refining(length_of=lambda sample, bad=bad: bad)(samples(3, 4))
    with pytest.raises(
        ConfigError,
        match="same streams for every sample, but returned {'x': 3} for sample 0, {} for",
    ):
        refining(length_of=lambda sample: {"x": 3} if len(sample["input_ids"]) == 3 else {})(
            samples(3, 4)
        )
    with pytest.raises(RuntimeError, match="length_of failed on sample 0.*StopIteration"):
        refining(length_of=lambda sample: next(iter(())))(samples(3, 4))
    with pytest.warns(UserWarning, match="samples are padded already"):
        assert (
            measure_sample(
                {"input_ids": torch.zeros(8), "attention_mask": torch.tensor([1, 1, 1, *[0] * 5])}
            )
            == 3
        )
    with pytest.raises(ConfigError, match="length_of"):
        measure_sample({"pixels": 1})


@pytest.mark.parametrize(
    ("data", "collate_fn", "layout", "length_of"),
    [
        (Raw(), from_text, "padded", collated_length(from_text)),
        (IDS, padded_by(90), "padded", None),
        (IDS, padded_by(90), "padded", ids_of),
        (IDS, padded_by(90), "padded", collated_length(padded_by(90))),
        (IDS, longer_packed, "packed", None),
        (IDS, longer_packed, "packed", collated_length(longer_packed)),
    ],
)
@pytest.mark.parametrize("mode", [{"window": 16, "shuffle": True}, {"samples_per_update": 16}])
@pytest.mark.filterwarnings("ignore:`collate_fn` made a batch")
@pytest.mark.filterwarnings("ignore:.*of the tokens are padding")
def test_collated_batches_fit_whatever_the_collate_function_adds(
    data: Any, collate_fn: Any, layout: Any, length_of: Any, mode: Any
) -> None:
    budget = TokenBudget(600, layout=layout)
    loader = OnlineDataLoader(data, budget, collate_fn=collate_fn, length_of=length_of, **mode)
    for _ in range(2):
        before, steps = loader.stats.copy(), list(loader)
        assert sorted(i for step in steps for i in step.indices) == list(range(60))
        assert all(step.batch["input_ids"].numel() <= 600 for step in steps)
        counted = (loader.stats - before).padded_tokens
        assert counted == sum(step.batch["input_ids"].numel() for step in steps)


def test_true_lengths_are_read_from_the_mask_and_a_sample_that_is_too_long_alone_is_oversize() -> (
    None
):
    """One of the images becomes ninety tokens."""

    def with_images(batch: list[Any]) -> Any:
        found = [torch.ones(90 if len(s["input_ids"]) == 3 else len(s["input_ids"])) for s in batch]
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(found, batch_first=True)
        return {"input_ids": ids, "attention_mask": ids, "labels": ids}

    refine = refining(with_images, max_tokens=100)
    with pytest.warns(UserWarning, match="90 tokens per row .*longest sample was measured as 5"):
        batches = list(refine(samples(5, 3, 4, 2)))
    assert [(b.indices, b.lengths["tokens"].tolist()) for b in batches] == [
        ([1], [90]),
        ([0, 2, 3], [5, 4, 2]),
    ]
    with pytest.warns(UserWarning, match="90 tokens per row"):
        batches = list(refining(with_images, max_tokens=80)(samples(5, 3, 4)))
    assert [(b.indices, b.oversize) for b in batches] == [([1], True), ([0, 2], False)]
    with (
        pytest.raises(BudgetError, match=r"sample 1 \(90 tokens\) does not fit even alone"),
        pytest.warns(UserWarning, match="90 tokens"),
    ):
        refining(with_images, max_tokens=80, oversize="error")(samples(5, 3, 4))


def test_every_batch_is_collated_once_if_its_length_is_as_measured() -> None:
    asked: list[int] = []
    loader = OnlineDataLoader(
        IDS, TokenBudget(600), collate_fn=lambda b: asked.append(len(b)) or collate(b), window=16
    )
    assert sorted(len(step.indices) for step in loader) == sorted(asked)
    with pytest.warns(UserWarning, match="pad_to_multiple_of"):
        refining(padded_by(1), length_of=ids_of)(samples(3, 4))


def test_samples_without_ids_need_a_length_of_and_collated_length_needs_ids() -> None:
    with pytest.raises(ConfigError, match=r"no 'input_ids'.*collated_length\(collate_fn\)"):
        list(OnlineDataLoader(Raw(), TokenBudget(600), collate_fn=from_text))
    with pytest.raises(ConfigError, match="`collated_length` needs a `collate_fn` that returns"):
        collated_length(list)([3])
    with pytest.raises(ConfigError, match="`collate_fn` must be a function"):
        collated_length(3)  # pyright: ignore[reportArgumentType]


def both(pair: list[int]) -> dict[str, int]:
    return {"source": pair[0], "target": pair[1]}


@pytest.mark.parametrize("mode", [{"shuffle": True, "window": 100}, {"samples_per_update": 60}])
def test_batches_of_two_streams_fit_and_are_counted_in_both_in_every_epoch(
    mode: dict[str, Any],
) -> None:
    loader = OnlineDataLoader(
        PAIRS, TokenBudget(2000), collate_fn=list, length_of=both, weigh="samples", **mode
    )
    for _ in range(2):  # the second epoch is planned from what the first has measured
        before, steps = loader.stats.copy(), list(loader)
        assert_conserves([list(step.indices) for step in steps], range(300))
        shapes = [(len(step.batch), *np.max(step.batch, axis=0)) for step in steps]
        assert all(count * (source + target) <= 2000 for count, source, target in shapes)
        stats = loader.stats - before
        assert stats.padded_tokens == sum(
            count * (source + target) for count, source, target in shapes
        )
        assert (stats.real_tokens, stats.padding < 0.45) == (np.sum(PAIRS), True)
    with pytest.raises(
        ConfigError,
        match="`shapes` are for one length, but `length_of` returns .'source', 'target'.;",
    ):
        list(
            OnlineDataLoader(
                PAIRS, TokenBudget(2000), length_of=both, shapes=2, length_hint=[9] * 300
            )
        )


def longer_labels(batch: list[list[int]]) -> dict[str, np.ndarray]:
    source, target = np.max(batch, axis=0)
    return {
        "input_ids": np.ones((len(batch), source)),
        "labels": np.ones((len(batch), target + 90)),
    }


def test_the_second_stream_is_corrected_as_the_first_is() -> None:
    with pytest.warns(UserWarning, match="95 target per row.*measured as 5"):
        batches = list(refining(longer_labels, 110, **IN_BOTH)([[3, 5], [4, 2]]))
    assert [(b.indices, b.padded, b.oversize) for b in batches] == [
        ([0], 98, False),
        ([1], 96, False),
    ]


IN_BOTH = {"length_of": both, "weigh": "samples"}


@pytest.mark.parametrize(
    ("collator", "batch", "said"),
    [
        (refining(failing), samples(3, 4), r"dataset indices \[0, 1\]: ValueError: no such token"),
        (
            refining(list, oversize="error", **IN_BOTH),
            [[3, 5], [60, 50]],
            r"sample 1 \(60 source, 50 target\) does not",
        ),
    ],
)
def test_what_fails_or_is_asked_to_be_refused_is_named(
    collator: Any, batch: Any, said: str
) -> None:
    with pytest.raises((BudgetError, RuntimeError), match=said):
        collator(batch)


def test_tensors_of_any_type_and_windows_survive_packing_and_pickling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [
        torch.ones(3, 2),
        torch.zeros(0, 4),
        torch.tensor(1),
        torch.arange(16).reshape(4, 4).T,
    ]
    for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.uint8):
        value = [tensor.to(dtype) for tensor in shapes]
        back = unpack_tensors(dict, *pack_tensors([{"x": value, "same": value[0]}]))
        assert all(
            torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(back["x"], value, strict=True)
        )
        assert back["same"] is back["x"][0]
    monkeypatch.setattr("dynagroup.online.messages.BLOCK_BYTES", 256)
    window = refining(max_tokens=20)(samples(4, 5, 3, 19, 7, 7))
    for one, other in zip(pickle.loads(pickle.dumps(window)), window, strict=True):
        assert one.indices == other.indices
        assert torch.equal(one.batch["input_ids"], other.batch["input_ids"])

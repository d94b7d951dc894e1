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
from dynagroup.testing import assert_conserves
from dynagroup.update.blocks import from_blocks, to_blocks
from tests.online.helpers import collate, collate_packed

PAIRS = np.random.default_rng(0).lognormal(3, 0.8, (300, 2)).clip(1, 200).astype(int).tolist()


def samples(*lengths: int) -> list[dict[str, torch.Tensor]]:
    rows = [torch.ones(length, dtype=torch.int64) for length in lengths]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def refining(
    collate_fn: Any = collate, max_tokens: int = 100, length_of: Any = None, **options: Any
) -> Any:
    return RefinementCollator(collate_fn, TokenBudget(max_tokens), length_of, **options)


def indices_of(items: Any) -> list[Any]:
    return [list(item.indices) for item in items]


def tokens_of(batches: Any) -> list[list[int]]:
    return [batch.lengths["tokens"].tolist() for batch in batches]


def padded_by(extra: int) -> Any:
    def padded(batch: Any) -> Any:
        fields = collate(batch)
        return {name: torch.nn.functional.pad(rows, (0, extra)) for name, rows in fields.items()}

    return padded


def longer(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The sample with two tokens more in front."""
    return {name: torch.cat([ids[:2], ids]) for name, ids in sample.items()}


def longer_packed(batch: list[Any]) -> Any:
    return collate_packed(list(map(longer, batch)))


def expanded_ids(ids: torch.Tensor) -> torch.Tensor:
    """9, 8 for each 9."""
    tokens: list[int] = []
    for token in ids.tolist():
        tokens += [9, 8] if token == 9 else [token]
    return torch.tensor(tokens)


def test_a_batch_that_is_collated_twice_is_made_of_the_samples_that_came() -> None:
    """Also where the collate function puts 9, 8 for each 9, and gives its samples the new ids."""

    def expanded(batch: list[Any]) -> Any:
        for sample in batch:
            sample["input_ids"] = expanded_ids(sample["input_ids"])
        return collate([{"labels": sample["input_ids"], **sample} for sample in batch])

    refine = refining(expanded, max_tokens=8, weigh="samples")
    window = [{"input_ids": torch.tensor(ids)} for ids in ([1, 9, 9], [4, 5])]
    with pytest.warns(UserWarning, match="5 tokens per sample.*collated_length"):
        batches = list(refine(window))
    assert [batch.batch["input_ids"].tolist() for batch in batches] == [[[1, 9, 8, 9, 8]], [[4, 5]]]
    assert tokens_of(batches) == [[5], [2]]
    assert window[0]["input_ids"].tolist() == [1, 9, 9]


def from_text(batch: list[Any]) -> Any:
    """Tokenizes in the collate function, takes the text out of the samples, and puts five tokens in front."""
    lengths = [5 + len(sample.pop("text")) for sample in batch]
    return collate(samples(*lengths))


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


def test_batches_that_fit_are_left_alone() -> None:
    assert indices_of(refining(max_tokens=20)(samples(4, 5, 3))) == [[0, 1, 2]]


def test_other_batches_are_cut_with_the_most_work_first() -> None:
    """10 + 9 tokens, not 18 + 3."""
    assert indices_of(refining(max_tokens=20)(samples(9, 5, 3))) == [[1, 2], [0]]


def test_what_does_not_fit_comes_alone() -> None:
    batches = list(refining(max_tokens=5)(samples(3, 9, 2)))
    assert indices_of(batches) == [[1], [0], [2]]
    assert [batch.oversize for batch in batches] == [True, False, False]


def test_what_does_not_fit_is_refused_where_asked() -> None:
    with pytest.raises(BudgetError, match=r"sample 1 \(9 tokens\)"):
        refining(max_tokens=5, oversize="error")(samples(3, 9, 2))


def test_samples_that_do_not_fit_are_warned_of_once_and_counted() -> None:
    loader = OnlineDataLoader(samples(300, 4, 400), TokenBudget(64), collate_fn=collate)
    with pytest.warns(UserWarning, match="does not fit the budget even alone") as caught:
        assert sorted(indices_of(loader)) == [[0], [1], [2]]
    assert len(caught) == 1
    assert loader.stats.oversize == 2


@pytest.mark.parametrize("bad", [-1, 2.5, None, True, 2**31])
def test_lengths_must_be_counts_of_int32(bad: Any) -> None:
    """What is longer would wrap to a small number, and fit."""
    with pytest.raises(ConfigError, match=f"length_of.*{2**31 - 1}.*{bad}"):
        refining(length_of=lambda sample: bad)(samples(3, 4))


def test_lengths_must_have_the_same_streams() -> None:
    def length_of(sample: Any) -> dict[str, int]:
        return {"x": 3} if ids_of(sample) == 3 else {}

    message = "same streams for every sample, but returned {'x': 3} for sample 0, {} for"
    with pytest.raises(ConfigError, match=message):
        refining(length_of=length_of)(samples(3, 4))


def test_a_stray_stop_iteration_of_length_of_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="length_of failed on sample 0.*StopIteration"):
        refining(length_of=lambda sample: next(iter(())))(samples(3, 4))


def test_padded_samples_are_measured_by_their_mask() -> None:
    mask = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0])
    with pytest.warns(UserWarning, match="samples are padded already"):
        assert measure_sample({"input_ids": torch.zeros(8), "attention_mask": mask}) == 3


def test_samples_that_cannot_be_measured_need_a_length_of() -> None:
    with pytest.raises(ConfigError, match="length_of"):
        measure_sample({"pixels": 1})


GROWING = [
    (Raw(), from_text, "padded", collated_length(from_text)),
    (IDS, padded_by(90), "padded", None),
    (IDS, padded_by(90), "padded", ids_of),
    (IDS, padded_by(90), "padded", collated_length(padded_by(90))),
    (IDS, longer_packed, "packed", None),
    (IDS, longer_packed, "packed", collated_length(longer_packed)),
]


@pytest.mark.parametrize(("data", "collate_fn", "layout", "length_of"), GROWING)
@pytest.mark.parametrize("mode", [{"window": 16, "shuffle": True}, {"samples_per_update": 16}])
@pytest.mark.filterwarnings("ignore:`collate_fn` made a batch")
@pytest.mark.filterwarnings("ignore:.*of the tokens are padding")
def test_collated_batches_fit_whatever_the_collate_function_adds(
    data: Any, collate_fn: Any, layout: Any, length_of: Any, mode: Any
) -> None:
    budget = TokenBudget(600, layout=layout)
    loader = OnlineDataLoader(data, budget, collate_fn=collate_fn, length_of=length_of, **mode)
    for _ in range(2):
        before = loader.stats.copy()
        steps = list(loader)
        assert_conserves(indices_of(steps), range(60))
        num_tokens = [step.batch["input_ids"].numel() for step in steps]
        assert max(num_tokens) <= 600
        stats = loader.stats - before
        assert stats.padded_tokens == sum(num_tokens)


def with_images(batch: list[Any]) -> Any:
    """An image of three tokens becomes ninety."""
    lengths = [90 if ids_of(sample) == 3 else ids_of(sample) for sample in batch]
    rows = [torch.ones(length) for length in lengths]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": ids, "labels": ids}


def test_true_lengths_are_read_from_the_mask() -> None:
    with pytest.warns(UserWarning, match="90 tokens per sample .*longest sample was measured as 5"):
        batches = list(refining(with_images, max_tokens=100)(samples(5, 3, 4, 2)))
    assert indices_of(batches) == [[1], [0, 2, 3]]
    assert tokens_of(batches) == [[90], [5, 4, 2]]


def test_a_sample_that_is_too_long_once_collated_is_oversize() -> None:
    with pytest.warns(UserWarning, match="90 tokens per sample"):
        batches = list(refining(with_images, max_tokens=80)(samples(5, 3, 4)))
    assert indices_of(batches) == [[1], [0, 2]]
    assert [batch.oversize for batch in batches] == [True, False]


@pytest.mark.filterwarnings("ignore:`collate_fn` made a batch")
def test_a_sample_that_is_too_long_once_collated_is_refused_where_asked() -> None:
    refine = refining(with_images, max_tokens=80, oversize="error")
    with pytest.raises(BudgetError, match=r"sample 1 \(90 tokens\) does not fit even alone"):
        refine(samples(5, 3, 4))


def test_every_batch_is_collated_once_if_its_length_is_as_measured() -> None:
    sizes: list[int] = []

    def counted(batch: Any) -> Any:
        sizes.append(len(batch))
        return collate(batch)

    loader = OnlineDataLoader(IDS, TokenBudget(600), collate_fn=counted, window=16)
    assert sorted(map(len, indices_of(loader))) == sorted(sizes)


def test_a_small_difference_is_said_to_be_of_padding() -> None:
    with pytest.warns(UserWarning, match="pad_to_multiple_of"):
        refining(padded_by(1), length_of=ids_of)(samples(3, 4))


def test_samples_without_ids_need_a_length_of() -> None:
    with pytest.raises(ConfigError, match=r"no 'input_ids'.*collated_length\(collate_fn\)"):
        list(OnlineDataLoader(Raw(), TokenBudget(600), collate_fn=from_text))


def test_collated_length_needs_a_function_that_gives_ids() -> None:
    with pytest.raises(ConfigError, match="`collated_length` needs a `collate_fn` that returns"):
        collated_length(list)([3])
    with pytest.raises(ConfigError, match="`collate_fn` must be a function"):
        collated_length(3)  # pyright: ignore[reportArgumentType]


def both(pair: list[int]) -> dict[str, int]:
    return {"source": pair[0], "target": pair[1]}


def num_padded(batch: list[list[int]]) -> int:
    source, target = np.max(batch, axis=0)
    return len(batch) * (source + target)


@pytest.mark.parametrize("mode", [{"shuffle": True, "window": 100}, {"samples_per_update": 60}])
def test_batches_of_two_streams_fit_and_are_counted_in_both_in_every_epoch(
    mode: dict[str, Any],
) -> None:
    loader = OnlineDataLoader(
        PAIRS, TokenBudget(2000), collate_fn=list, length_of=both, weigh="samples", **mode
    )
    for _ in range(2):  # the second epoch is planned from what the first has measured
        before = loader.stats.copy()
        steps = list(loader)
        assert_conserves(indices_of(steps), range(300))
        num_tokens = [num_padded(step.batch) for step in steps]
        assert max(num_tokens) <= 2000
        stats = loader.stats - before
        assert stats.padded_tokens == sum(num_tokens)
        assert stats.real_tokens == np.sum(PAIRS)
        assert stats.padding < 0.45


def test_shapes_of_two_streams_are_refused() -> None:
    loader = OnlineDataLoader(
        PAIRS, TokenBudget(2000), length_of=both, shapes=2, length_hint=[9] * 300
    )
    message = "`shapes` are for one length, but `length_of` returns .'source', 'target'.;"
    with pytest.raises(ConfigError, match=message):
        list(loader)


def longer_labels(batch: list[list[int]]) -> dict[str, np.ndarray]:
    source, target = np.max(batch, axis=0)
    ids = np.ones((len(batch), source))
    return {"input_ids": ids, "labels": np.ones((len(batch), target + 90))}


def test_the_second_stream_is_corrected_as_the_first_is() -> None:
    refine = refining(longer_labels, 110, length_of=both, weigh="samples")
    with pytest.warns(UserWarning, match="95 target per sample.*measured as 5"):
        batches = list(refine([[3, 5], [4, 2]]))
    assert indices_of(batches) == [[0], [1]]
    assert [batch.padded for batch in batches] == [98, 96]
    assert not any(batch.oversize for batch in batches)


def test_a_collate_function_that_fails_is_named_with_its_samples() -> None:
    with pytest.raises(RuntimeError, match=r"dataset indices \[0, 1\]: ValueError: no such token"):
        refining(failing)(samples(3, 4))


def test_a_sample_of_two_streams_that_is_refused_is_named() -> None:
    refine = refining(list, oversize="error", length_of=both, weigh="samples")
    with pytest.raises(BudgetError, match=r"sample 1 \(60 source, 50 target\) does not"):
        refine([[3, 5], [60, 50]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.uint8])
def test_tensors_of_any_type_survive_packing(dtype: torch.dtype) -> None:
    transposed = torch.arange(16).reshape(4, 4).T
    shapes = [torch.ones(3, 2), torch.zeros(0, 4), torch.tensor(1), transposed]
    tensors = [tensor.to(dtype) for tensor in shapes]
    unpacked = from_blocks(dict, *to_blocks([{"x": tensors, "same": tensors[0]}]))
    for tensor, original in zip(unpacked["x"], tensors, strict=True):
        assert tensor.dtype == dtype
        assert torch.equal(tensor, original)
    assert unpacked["same"] is unpacked["x"][0]


def test_windows_survive_pickling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynagroup.update.blocks.BLOCK_BYTES", 256)
    window = refining(max_tokens=20)(samples(4, 5, 3, 19, 7, 7))
    pickled = pickle.loads(pickle.dumps(window))
    assert indices_of(pickled) == indices_of(window)
    for one, other in zip(pickled, window, strict=True):
        assert torch.equal(one.batch["input_ids"], other.batch["input_ids"])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float32])
def test_a_mask_of_any_type_tells_a_padded_sample(dtype: torch.dtype) -> None:
    full = {"input_ids": torch.zeros(5), "attention_mask": torch.ones(5, dtype=dtype)}
    assert measure_sample(full) == 5
    padded = torch.tensor([0, 0, 1, 1, 1], dtype=dtype)
    with pytest.warns(UserWarning, match="samples are padded already"):
        assert measure_sample({**full, "attention_mask": padded}) == 3

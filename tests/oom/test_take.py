"""Samples taken out of a batch: each kind of field, padding that goes, packs, images, and what is refused."""

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding, DataCollatorWithFlattening, DynamicCache

from dynagroup.errors import ConfigError
from dynagroup.oom import BatchSplitter, LearningBudget, OomSafeBackward
from dynagroup.oom.take import packed_borders, shape_of
from tests.integrations import toys
from tests.models import Allocator, small_tokenizer
from tests.packed import test_training as training

Batch = dict[str, Any]
take = BatchSplitter().take
COLLATE = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
ROWS = torch.arange(6).reshape(3, 2)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def mask_of(*rows: str) -> torch.Tensor:
    return torch.tensor([list(map(int, row)) for row in rows])


def test_a_tensor_is_cut_by_its_first_dimension() -> None:
    part = take(ROWS, 1, 3)
    assert part.tolist() == [[2, 3], [4, 5]]


def test_an_array_is_cut_by_its_first_dimension() -> None:
    array = np.arange(3)
    part = take(array, 0, 1)
    assert part.tolist() == [0]


def test_a_list_has_an_entry_a_sample() -> None:
    part = take(["a", "b", "c"], 1, 2)
    assert part == ["b"]


def test_a_list_may_hold_tensors_of_unequal_lengths() -> None:
    waves = [torch.zeros(3), torch.zeros(5), torch.zeros(4)]
    part = take(waves, 0, 2)
    assert [len(wave) for wave in part] == [3, 5]


def test_a_tuple_is_cut_field_by_field() -> None:
    fields = (torch.arange(3), ROWS)
    x, y = take(fields, 1, 2)
    assert x.tolist() == [1]
    assert y.tolist() == [[2, 3]]


def test_a_named_tuple_stays_one() -> None:
    pair = Pair(torch.arange(3), ROWS)
    part = take(pair, 1, 2)
    assert part.x.tolist() == [1]
    assert part.y.tolist() == [[2, 3]]


def test_a_list_of_default_collate_is_one_of_fields() -> None:
    samples = [(1, 2), (3, 4), (5, 6)]
    collated = torch.utils.data.default_collate(samples)
    assert isinstance(collated, list)
    first, second = take(collated, 0, 2)
    assert first.tolist() == [1, 3]
    assert second.tolist() == [2, 4]


def test_mappings_inside_a_batch_are_cut_and_single_values_kept() -> None:
    extra = {"names": ["a", "b", "c", "d"], "scale": 2.0}
    batch = {"x": torch.arange(4), "extra": extra}
    part = take(batch, 2, 4)
    assert part["x"].tolist() == [2, 3]
    assert part["extra"]["names"] == ["c", "d"]
    assert part["extra"]["scale"] == 2.0
    assert part["extra"].keys() == extra.keys()


def test_a_mapping_keeps_its_class_and_fields_of_the_whole_batch() -> None:
    """A cache's positions are as long as the batch has samples, by accident."""
    fields = {"input_ids": torch.zeros(4, 4), "cache_position": torch.arange(4)}
    mapping = OrderedDict(fields, num_items_in_batch=torch.tensor(7))
    part = take(mapping, 0, 1)
    assert isinstance(part, OrderedDict)
    assert part["cache_position"].tolist() == [0, 1, 2, 3]
    assert part["num_items_in_batch"] == 7


def test_the_whole_batch_stays_as_it_is() -> None:
    batch = {"input_ids": torch.zeros(4, 4)}
    part = take(batch, 0, 1)
    assert len(part["input_ids"]) == 1
    assert len(batch["input_ids"]) == 4


TRIMMED = [
    (("1100", "1110"), 3),
    (("0110", "0010"), 3),
    (("0011", "0001"), 4),
    (("0000", "0000"), 4),
    (("1000", "0100"), 2),
]


def masked_batch(*rows: str) -> Batch:
    ids = torch.arange(4 * len(rows)).reshape(-1, 4)
    mask = mask_of(*rows)
    labels = torch.full_like(ids, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize(("rows", "width"), TRIMMED)
def test_a_part_is_trimmed_to_its_own_longest(rows: tuple[str, ...], width: int) -> None:
    batch = masked_batch(*rows, "1111")
    part = take(batch, 0, 2)
    assert part.keys() == batch.keys()
    for value in part.values():
        assert value.shape == (2, width)
    ids = batch["input_ids"][:2, :width]
    assert part["input_ids"].tolist() == ids.tolist()


@pytest.mark.parametrize(("rows", "width"), TRIMMED)
def test_trimming_can_be_switched_off(rows: tuple[str, ...], width: int) -> None:
    batch = masked_batch(*rows, "1111")
    splitter = BatchSplitter(trim=False)
    part = splitter.take(batch, 0, 2)
    assert part["input_ids"].shape == (2, 4)


@pytest.fixture
def padded() -> Batch:
    """A sample of two tokens and one of four."""
    ids = torch.ones(2, 4)
    return {"input_ids": ids, "attention_mask": mask_of("1100", "1111")}


def test_labels_on_padding_are_not_trimmed(padded: Batch) -> None:
    """Or a target side that is as wide as the source by accident."""
    row = torch.tensor([[5, 6, 7, 8]])
    padded["labels"] = row.repeat(2, 1)
    part = take(padded, 0, 1)
    assert part["labels"].tolist() == row.tolist()
    assert part["input_ids"].shape == (1, 4)


def test_a_field_of_unknown_meaning_stops_trimming(padded: Batch) -> None:
    padded["tags"] = torch.ones(2, 4)
    part = take(padded, 0, 1)
    assert part["input_ids"].shape == (1, 4)


def test_nothing_is_trimmed_without_a_mask() -> None:
    values = torch.ones(2, 5)
    part = take({"input_values": values, "labels": values}, 0, 1)
    assert part["labels"].shape == (1, 5)


def test_positions_may_have_an_axis_before_the_samples(padded: Batch) -> None:
    positions = torch.arange(24).reshape(3, 2, 4)
    padded["position_ids"] = positions
    part = take(padded, 0, 1)
    expected = positions[:, :1, :2]
    assert part["position_ids"].tolist() == expected.tolist()


def test_positions_may_be_one_row_for_all_samples(padded: Batch) -> None:
    padded["position_ids"] = torch.arange(4)[None]
    part = take(padded, 0, 1)
    assert part["position_ids"].tolist() == [[0, 1]]


def test_positions_may_be_a_row_a_sample(padded: Batch) -> None:
    padded["position_ids"] = torch.arange(8).reshape(2, 4)
    part = take(padded, 1, 2)
    assert part["position_ids"].tolist() == [[4, 5, 6, 7]]


# Sample 0: an image of 8 patches (2 tokens); sample 1: none; sample 2: images of 4 and 12 patches (1 and 3 tokens).
IDS = torch.tensor([[9, 9, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [9, 1, 9, 9, 9, 1]])
GRID = torch.tensor([[1, 2, 4], [1, 2, 2], [1, 2, 6]])
IMAGES: Batch = {
    "input_ids": IDS,
    "attention_mask": torch.ones_like(IDS),
    "pixel_values": torch.arange(24)[:, None],
    "image_grid_thw": GRID,
}
SPANS = [
    ((0, 1), [0], range(8)),
    ((0, 2), [0], range(8)),
    ((1, 2), None, None),
    ((2, 3), [1, 2], range(8, 24)),
]


def assert_has_images(part: Batch, images: list[int] | None, patches: Any) -> None:
    if images is None:
        assert part["pixel_values"] is None
        assert part["image_grid_thw"] is None
        return
    grid = part["image_grid_thw"]
    assert grid.tolist() == GRID[images].tolist()
    pixels = part["pixel_values"].flatten()
    assert pixels.tolist() == list(patches)


@pytest.mark.parametrize(("span", "images", "patches"), SPANS)
def test_concatenated_images_go_with_their_samples_by_the_types_of_tokens(
    span: tuple[int, int], images: Any, patches: Any
) -> None:
    types = (IDS == 9).long()
    batch = {**IMAGES, "mm_token_type_ids": types}
    part = take(batch, *span)
    assert_has_images(part, images, patches)


def test_a_batch_encoding_stays_one() -> None:
    tokenizer = small_tokenizer()
    batch = tokenizer(["w1 w2 w1", "w2", "w1 w2"], padding=True, return_tensors="pt")
    part = take(batch, 1, 3)
    assert isinstance(part, BatchEncoding)
    assert part["input_ids"].tolist() == [[6, 0], [5, 6]]
    words = part.word_ids(1)
    assert words[:2] == [0, 1]


def test_trimmed_columns_are_in_one_piece_as_losses_that_view_them_need() -> None:
    mask = mask_of("1100", "1110", "1111")
    labels = mask.masked_fill(mask == 0, -100)
    batch = {"attention_mask": mask, "labels": labels}
    part = take(batch, 0, 2)
    column = part["labels"].view(-1)
    assert column.tolist() == [1, 1, -100, 1, 1, 1]


def rows_of(lengths: list[int]) -> list[Batch]:
    rows = []
    for length in lengths:
        ids = list(range(1, length + 1))
        rows.append({"input_ids": ids, "labels": ids})
    return rows


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(LENGTHS, st.data())
def test_a_part_is_what_the_collator_makes_of_its_samples(
    lengths: list[int], data: st.DataObject
) -> None:
    last = len(lengths) - 1
    start = data.draw(st.integers(0, last))
    stop = data.draw(st.integers(start + 1, len(lengths)))
    rows = rows_of(lengths)
    part = take(COLLATE(rows), start, stop)
    expected = COLLATE(rows[start:stop])
    torch.testing.assert_close(part, expected, rtol=0, atol=0)


@given(LENGTHS)
def test_the_samples_of_a_pack_are_counted(lengths: list[int]) -> None:
    batch = COLLATE(rows_of(lengths))
    assert BatchSplitter().num_samples(batch) == len(lengths)


@given(LENGTHS, st.integers(0, 3))
def test_positions_alone_show_the_borders_wherever_they_start(
    lengths: list[int], first: int
) -> None:
    collate = DataCollatorWithFlattening(position_ids_start=first)
    batch = collate(rows_of(lengths))
    ends = np.cumsum(lengths)
    assert packed_borders(batch) == [0, *ends.tolist()]


ONE_ROW = torch.ones(1, 5, dtype=torch.long)
TWO_ROWS = ONE_ROW.expand(2, 5)
NO_PACKS: list[Batch] = [
    {"input_ids": ONE_ROW, "attention_mask": ONE_ROW},
    {"input_ids": ONE_ROW},
    {"input_ids": TWO_ROWS, "position_ids": TWO_ROWS},
]


@pytest.mark.parametrize("batch", NO_PACKS, ids=["a mask", "no positions", "two rows"])
def test_a_padded_row_is_no_pack(batch: Batch) -> None:
    assert packed_borders(batch) is None


def test_a_pack_costs_the_sum_of_its_tokens() -> None:
    batch = COLLATE(rows_of([3, 7, 2]))
    shape = shape_of(batch, 3)
    assert shape.num_samples[0] == 3
    assert shape.longest["tokens"][0] == 7
    assert shape.total["tokens"][0] == 12


LISTED = {"input_ids": torch.ones(2, 4), "images": torch.ones(5, 3)}
ODD = {**COLLATE(rows_of([3, 4])), "extra": torch.zeros(5)}
CACHED = {"input_ids": torch.ones(3, 1), "past_key_values": DynamicCache()}
REFUSED: list[tuple[Any, str]] = [
    (LISTED, r"`images` \(\(5, 3\)\) has no entry per sample in a batch of 2.*rules="),
    (ODD, r"`extra` \(5,\) has no entry for each of 7 tokens or of 2 samples"),
    (CACHED, r"`past_key_values` \(DynamicCache\) has no entry"),
    ({"a": torch.ones(2), "b": torch.ones(3)}, "cannot tell how many samples a batch has"),
    (3, "a batch of type int cannot be split"),
    (IMAGES, "cannot tell which images belong to which sample"),
]


@pytest.mark.parametrize(("batch", "message"), REFUSED)
def test_what_fits_no_rule_is_refused_with_the_way_out(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        take(batch, 0, 1)


def two_a_sample(value: torch.Tensor, batch: Batch, start: int, stop: int) -> torch.Tensor:
    return value[2 * start : 2 * stop]


def first_entry(value: torch.Tensor, *_: Any) -> torch.Tensor:
    return value[:1]


def test_a_rule_of_ones_own_decides_for_padded_samples() -> None:
    splitter = BatchSplitter(rules={"images": two_a_sample})
    part = splitter.take(LISTED, 0, 1)
    assert len(part["images"]) == 2


def test_a_rule_of_ones_own_decides_for_packed_samples() -> None:
    splitter = BatchSplitter(rules={"extra": first_entry})
    part = splitter.take(ODD, 0, 1)
    assert part["extra"].tolist() == [0]


def test_images_must_add_up() -> None:
    types = (IDS[[0, 1, 1]] == 9).long()
    batch = {**IMAGES, "mm_token_type_ids": types}
    message = r"\[2, 0, 0\] image tokens, which do not add up to images of \[8, 4, 12\] patches"
    with pytest.raises(ConfigError, match=message):
        take(batch, 0, 1)


def test_images_need_their_placeholder_tokens() -> None:
    batch = {**IMAGES, "mm_token_type_ids": torch.zeros_like(IDS)}
    with pytest.raises(ConfigError, match=r"\[0, 0, 0\] image tokens"):
        take(batch, 0, 1)


def gradient_of(batch: Batch, attention: str, allocator: Allocator) -> torch.Tensor:
    model = training.llama(attention)

    def mean_loss(part: Batch) -> torch.Tensor:
        allocator.claim(part["input_ids"].numel())
        inputs = dict(part)
        inputs.pop("seq_idx")
        is_label = part["labels"][:, 1:] != -100
        return training.summed_loss(model, inputs) / is_label.sum()

    backward = OomSafeBackward(model, learned=LearningBudget())
    backward(mean_loss, batch)
    gradients = [parameter.grad.flatten() for parameter in model.parameters()]
    return torch.cat(gradients)


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_a_split_pack_has_the_gradient_of_the_whole(attention: str) -> None:
    samples = toys.samples("causal", 10)
    batch = COLLATE(samples)
    num_tokens = batch["input_ids"].numel()
    large = Allocator(num_tokens)
    small = Allocator(num_tokens * 0.4)
    whole = gradient_of(batch, attention, large)
    split = gradient_of(batch, attention, small)
    assert len(small.failures) >= 2
    difference = split - whole
    assert difference.abs().max() < 1e-9 * whole.abs().max()

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
from dynagroup.oom import BatchSplitter, LearningBudget, OomSafeBackward, VisionTokens
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


def test_tensors_arrays_and_lists_are_cut_by_their_first_dimension() -> None:
    assert take(ROWS, 1, 3).tolist() == [[2, 3], [4, 5]]
    assert take(np.arange(3), 0, 1).tolist() == [0]
    assert take(["a", "b", "c"], 1, 2) == ["b"]
    waves = [torch.zeros(3), torch.zeros(5), torch.zeros(4)]
    assert [len(wave) for wave in take(waves, 0, 2)] == [3, 5]


def test_tuples_are_cut_field_by_field_and_keep_their_kind() -> None:
    x, y = take((torch.arange(3), ROWS), 1, 2)
    assert x.tolist() == [1]
    assert y.tolist() == [[2, 3]]
    pair = take(Pair(torch.arange(3), ROWS), 1, 2)
    assert pair.x.tolist() == [1]
    assert pair.y.tolist() == [[2, 3]]


def test_a_list_of_default_collate_is_one_of_fields() -> None:
    collated = torch.utils.data.default_collate([(1, 2), (3, 4), (5, 6)])
    assert isinstance(collated, list)
    assert [field.tolist() for field in take(collated, 0, 2)] == [[1, 3], [2, 4]]


def test_mappings_inside_a_batch_are_cut_and_single_values_kept() -> None:
    extra = {"names": ["a", "b", "c", "d"], "scale": 2.0}
    part = take({"x": torch.arange(4), "extra": extra}, 2, 4)
    assert part["x"].tolist() == [2, 3]
    assert part["extra"] == {"names": ["c", "d"], "scale": 2.0}


def test_a_mapping_keeps_its_class_and_fields_of_the_whole_batch() -> None:
    """A cache's positions are as long as the batch has samples, by accident."""
    fields = {"input_ids": torch.zeros(4, 4), "cache_position": torch.arange(4)}
    mapping = OrderedDict(fields, num_items_in_batch=torch.tensor(7))
    part = take(mapping, 0, 1)
    assert isinstance(part, OrderedDict)
    assert part["cache_position"].tolist() == [0, 1, 2, 3]
    assert part["num_items_in_batch"] == 7
    assert len(mapping["input_ids"]) == 4


TRIMMED = [
    (("1100", "1110"), 3),
    (("0110", "0010"), 3),
    (("0011", "0001"), 4),
    (("0000", "0000"), 4),
    (("1000", "0100"), 2),
]


@pytest.mark.parametrize(("rows", "width"), TRIMMED)
def test_a_part_is_trimmed_to_its_own_longest(rows: tuple[str, ...], width: int) -> None:
    ids = torch.arange(12).reshape(3, 4)
    batch = {"input_ids": ids, "attention_mask": mask_of(*rows, "1111")}
    batch["labels"] = torch.full((3, 4), -100)
    part = take(batch, 0, 2)
    shapes = {name: tuple(value.shape) for name, value in part.items()}
    assert shapes == dict.fromkeys(batch, (2, width))
    assert part["input_ids"].tolist() == ids[:2, :width].tolist()
    assert BatchSplitter(trim=False).take(batch, 0, 2)["input_ids"].shape == (2, 4)


@pytest.fixture
def padded() -> Batch:
    """A sample of two tokens and one of four."""
    return {"input_ids": torch.ones(2, 4), "attention_mask": mask_of("1100", "1111")}


def test_labels_on_padding_are_not_trimmed(padded: Batch) -> None:
    """Or a target side that is as wide as the source by accident."""
    part = take({**padded, "labels": torch.tensor([[5, 6, 7, 8]] * 2)}, 0, 1)
    assert part["labels"].tolist() == [[5, 6, 7, 8]]
    assert part["input_ids"].shape == (1, 4)


def test_a_field_of_unknown_meaning_stops_trimming(padded: Batch) -> None:
    part = take({**padded, "tags": torch.ones(2, 4)}, 0, 1)
    assert part["input_ids"].shape == (1, 4)


def test_nothing_is_trimmed_without_a_mask() -> None:
    part = take({"input_values": torch.ones(2, 5), "labels": torch.ones(2, 5)}, 0, 1)
    assert part["labels"].shape == (1, 5)


def test_positions_may_have_an_axis_before_the_samples(padded: Batch) -> None:
    positions = torch.arange(24).reshape(3, 2, 4)
    part = take({**padded, "position_ids": positions}, 0, 1)
    assert part["position_ids"].tolist() == positions[:, :1, :2].tolist()


def test_positions_may_be_one_row_for_all_samples(padded: Batch) -> None:
    part = take({**padded, "position_ids": torch.arange(4)[None]}, 0, 1)
    assert part["position_ids"].tolist() == [[0, 1]]


def test_positions_may_be_a_row_a_sample(padded: Batch) -> None:
    part = take({**padded, "position_ids": torch.arange(8).reshape(2, 4)}, 1, 2)
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
    assert part["image_grid_thw"].tolist() == GRID[images].tolist()
    assert part["pixel_values"].flatten().tolist() == list(patches)


@pytest.mark.parametrize(("span", "images", "patches"), SPANS)
def test_concatenated_images_go_with_their_samples(
    span: tuple[int, int], images: Any, patches: Any
) -> None:
    """Whose they are is told by the image's token, or by the types of tokens."""
    by_token = BatchSplitter(vision=VisionTokens(image_token_id=9))
    assert_has_images(by_token.take(IMAGES, *span), images, patches)
    typed = {**IMAGES, "mm_token_type_ids": (IDS == 9).long()}
    assert_has_images(take(typed, *span), images, patches)


def test_a_batch_encoding_stays_one() -> None:
    texts = ["w1 w2 w1", "w2", "w1 w2"]
    part = take(small_tokenizer()(texts, padding=True, return_tensors="pt"), 1, 3)
    assert isinstance(part, BatchEncoding)
    assert part["input_ids"].tolist() == [[6, 0], [5, 6]]
    assert part.word_ids(1)[:2] == [0, 1]


def test_trimmed_columns_are_in_one_piece_as_losses_that_view_them_need() -> None:
    mask = mask_of("1100", "1110", "1111")
    labels = mask.masked_fill(mask == 0, -100)
    part = take({"attention_mask": mask, "labels": labels}, 0, 2)
    assert part["labels"].view(-1).tolist() == [1, 1, -100, 1, 1, 1]


def rows_of(lengths: list[int]) -> list[Batch]:
    tokens = [list(range(1, length + 1)) for length in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_a_part_is_what_the_collator_makes_of_its_samples(
    lengths: list[int], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(lengths) - 1))
    stop = data.draw(st.integers(start + 1, len(lengths)))
    batch = COLLATE(rows_of(lengths))
    assert BatchSplitter().num_samples(batch) == len(lengths)
    part = take(batch, start, stop)
    expected = COLLATE(rows_of(lengths[start:stop]))
    torch.testing.assert_close(part, expected, rtol=0, atol=0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 3))
def test_positions_alone_show_the_borders_wherever_they_start(
    lengths: list[int], first: int
) -> None:
    batch = DataCollatorWithFlattening(position_ids_start=first)(rows_of(lengths))
    assert packed_borders(batch) == [0, *np.cumsum(lengths).tolist()]


def test_a_padded_row_is_no_pack() -> None:
    ids = torch.ones(1, 5, dtype=torch.long)
    two_rows = ids.expand(2, 5)
    assert packed_borders({"input_ids": ids, "attention_mask": ids}) is None
    assert packed_borders({"input_ids": ids}) is None
    assert packed_borders({"input_ids": two_rows, "position_ids": two_rows}) is None


def test_a_pack_costs_the_sum_of_its_tokens() -> None:
    shape = shape_of(COLLATE(rows_of([3, 7, 2])), 3)
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


def test_rules_of_ones_own_decide() -> None:
    part = BatchSplitter(rules={"images": two_a_sample}).take(LISTED, 0, 1)
    assert len(part["images"]) == 2
    part = BatchSplitter(rules={"extra": first_entry}).take(ODD, 0, 1)
    assert part["extra"].tolist() == [0]


def test_images_must_add_up() -> None:
    splitter = BatchSplitter(vision=VisionTokens(image_token_id=9, merge_size=1))
    message = "2 image tokens, but another number of patches in `image_grid_thw`"
    with pytest.raises(ConfigError, match=message):
        splitter.take(IMAGES, 0, 1)


def gradient_of(batch: Batch, attention: str, allocator: Allocator) -> torch.Tensor:
    model = training.llama(attention)

    def mean_loss(part: Batch) -> torch.Tensor:
        allocator.claim(part["input_ids"].numel())
        inputs = {name: value for name, value in part.items() if name != "seq_idx"}
        num_labels = (part["labels"][:, 1:] != -100).sum()
        return training.summed_loss(model, inputs) / num_labels

    OomSafeBackward(model, learned=LearningBudget())(mean_loss, batch)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_a_split_pack_has_the_gradient_of_the_whole(attention: str) -> None:
    batch = COLLATE(toys.samples("causal", 10))
    num_tokens = batch["input_ids"].numel()
    small = Allocator(num_tokens * 0.4)
    whole = gradient_of(batch, attention, Allocator(num_tokens))
    split = gradient_of(batch, attention, small)
    assert len(small.failures) >= 2
    assert (split - whole).abs().max() < 1e-9 * whole.abs().max()

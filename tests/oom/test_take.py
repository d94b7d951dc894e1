from collections import OrderedDict, namedtuple
from typing import Any

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

take = BatchSplitter().take
Pair = namedtuple("Pair", "x y")
COLLATE = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)


def mask_of(*rows: str) -> torch.Tensor:
    return torch.tensor([[int(c) for c in row] for row in rows])


def test_every_usual_kind_of_batch_is_cut_and_keeps_its_kind() -> None:
    x, y = torch.arange(3), torch.arange(6).reshape(3, 2)
    assert take(y, 1, 3).tolist() == [[2, 3], [4, 5]]
    assert take(np.arange(3), 0, 1).tolist() == [0]
    assert take(["a", "b", "c"], 1, 2) == ["b"]
    assert [len(t) for t in take([torch.zeros(3), torch.zeros(5), torch.zeros(4)], 0, 2)] == [3, 5]
    assert [part.tolist() for part in take((x, y), 1, 2)] == [[1], [[2, 3]]]
    assert take(Pair(x, y), 1, 2).y.tolist() == [[2, 3]]
    collated = torch.utils.data.default_collate(
        [(1, 2), (3, 4), (5, 6)]
    )  # a list, by default_collate's convention
    assert [part.tolist() for part in take(collated, 0, 2)] == [[1, 3], [2, 4]]
    part = take(
        {"x": torch.arange(4), "extra": {"names": ["a", "b", "c", "d"], "scale": 2.0}}, 2, 4
    )
    assert (part["x"].tolist(), part["extra"]) == ([2, 3], {"names": ["c", "d"], "scale": 2.0})
    fields = {"input_ids": torch.zeros(4, 4), "cache_position": torch.arange(4)}
    mapping = OrderedDict(fields, num_items_in_batch=torch.tensor(7))
    part = take(mapping, 0, 1)
    assert isinstance(part, OrderedDict)
    assert part["cache_position"].tolist() == [
        0,
        1,
        2,
        3,
    ]  # as long as the batch has samples, by accident
    assert (part["num_items_in_batch"], len(mapping["input_ids"])) == (7, 4)


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        (("1100", "1110"), 3),
        (("0110", "0010"), 3),
        (("0011", "0001"), 4),
        (("0000", "0000"), 4),
        (("1000", "0100"), 2),
    ],
)
def test_a_part_is_trimmed_to_its_own_longest(rows: tuple[str, ...], kept: int) -> None:
    mask = mask_of(*rows, "1111")
    batch = {
        "input_ids": torch.arange(12).reshape(3, 4),
        "attention_mask": mask,
        "labels": torch.full((3, 4), -100),
    }
    part = take(batch, 0, 2)
    assert {key: tuple(value.shape) for key, value in part.items()} == dict.fromkeys(
        batch, (2, kept)
    )
    assert part["input_ids"].tolist() == batch["input_ids"][:2, :kept].tolist()
    assert BatchSplitter(trim=False).take(batch, 0, 2)["input_ids"].shape == (2, 4)


def test_what_would_lose_something_is_not_trimmed_and_position_ids_are_of_three_kinds() -> None:
    """A target side as wide as the source by accident, or labels on padding; a field of unknown meaning; no mask at all."""
    batch = {"input_ids": torch.ones(2, 4), "attention_mask": mask_of("1100", "1111")}
    part = take({**batch, "labels": torch.tensor([[5, 6, 7, 8]] * 2)}, 0, 1)
    assert (part["labels"].tolist(), part["input_ids"].shape) == ([[5, 6, 7, 8]], (1, 4))
    assert take({**batch, "tags": torch.ones(2, 4)}, 0, 1)["input_ids"].shape == (1, 4)
    assert take({"input_values": torch.ones(2, 5), "labels": torch.ones(2, 5)}, 0, 1)[
        "labels"
    ].shape == (1, 5)
    batch = {"input_ids": torch.ones(2, 4), "attention_mask": mask_of("1100", "1111")}
    mrope, own = torch.arange(24).reshape(3, 2, 4), torch.arange(8).reshape(2, 4)
    assert (
        take({**batch, "position_ids": mrope}, 0, 1)["position_ids"].tolist()
        == mrope[:, :1, :2].tolist()
    )
    assert take({**batch, "position_ids": torch.arange(4)[None]}, 0, 1)[
        "position_ids"
    ].tolist() == [[0, 1]]
    assert take({**batch, "position_ids": own}, 1, 2)["position_ids"].tolist() == [[4, 5, 6, 7]]


# Sample 0: an image of 8 patches (2 tokens); sample 1: none; sample 2: images of 4 and 12 patches (1 and 3 tokens).
IDS = torch.tensor([[9, 9, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [9, 1, 9, 9, 9, 1]])
GRID = torch.tensor([[1, 2, 4], [1, 2, 2], [1, 2, 6]])
IMAGES = {
    "input_ids": IDS,
    "attention_mask": torch.ones_like(IDS),
    "pixel_values": torch.arange(24)[:, None],
}
IMAGES["image_grid_thw"] = GRID


@pytest.mark.parametrize(
    ("span", "images", "patches"),
    [((0, 1), [0], (0, 8)), ((0, 2), [0], (0, 8)), ((1, 2), None, None), ((2, 3), [1, 2], (8, 24))],
)
def test_concatenated_images_go_with_their_samples(
    span: tuple[int, int], images: Any, patches: Any
) -> None:
    by_token = BatchSplitter(vision=VisionTokens(image_token_id=9)).take(IMAGES, *span)
    for part in (by_token, take({**IMAGES, "mm_token_type_ids": (IDS == 9).long()}, *span)):
        if images is None:
            assert part["pixel_values"] is part["image_grid_thw"] is None
        else:
            assert part["image_grid_thw"].tolist() == GRID[images].tolist()
            assert part["pixel_values"].flatten().tolist() == list(range(*patches))


def test_a_batch_encoding_stays_one_and_trimmed_columns_are_in_one_piece_as_losses_that_view_them_need() -> (
    None
):
    part = take(
        small_tokenizer()(["w1 w2 w1", "w2", "w1 w2"], padding=True, return_tensors="pt"), 1, 3
    )
    assert isinstance(part, BatchEncoding)
    assert part["input_ids"].tolist() == [[6, 0], [5, 6]]
    assert part.word_ids(1)[:2] == [0, 1]
    mask = mask_of("1100", "1110", "1111")
    part = take({"attention_mask": mask, "labels": mask.clone() - 100 * (1 - mask)}, 0, 2)
    assert part["labels"].view(-1).tolist() == [1, 1, -100, 1, 1, 1]


def rows_of(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"input_ids": list(range(1, n + 1)), "labels": list(range(1, n + 1))} for n in lengths]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_a_part_is_what_the_collator_makes_of_its_samples(
    lengths: list[int], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(lengths) - 1))
    stop = data.draw(st.integers(start + 1, len(lengths)))
    batch = COLLATE(rows_of(lengths))
    assert BatchSplitter().num_samples(batch) == len(lengths)
    part, wanted = BatchSplitter().take(batch, start, stop), COLLATE(rows_of(lengths[start:stop]))
    assert part.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (
            torch.equal(part[name], value)
            if isinstance(value, torch.Tensor)
            else part[name] == value
        ), name


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 3))
def test_positions_alone_show_the_borders_wherever_they_start(
    lengths: list[int], first: int
) -> None:
    batch = DataCollatorWithFlattening(position_ids_start=first)(rows_of(lengths))
    assert packed_borders(batch) == [0, *np.cumsum(lengths).tolist()]


def test_a_padded_row_is_no_pack_and_a_pack_costs_the_sum_of_its_tokens() -> None:
    ids = torch.ones(1, 5, dtype=torch.long)
    assert packed_borders({"input_ids": ids, "attention_mask": ids}) is None
    assert packed_borders({"input_ids": ids}) is None
    assert packed_borders({"input_ids": ids.expand(2, 5), "position_ids": ids.expand(2, 5)}) is None
    shape = shape_of(COLLATE(rows_of([3, 7, 2])), 3)
    assert (shape.num_samples[0], shape.longest["tokens"][0], shape.total["tokens"][0]) == (
        3,
        7,
        12,
    )


LISTED = {"input_ids": torch.ones(2, 4), "images": torch.ones(5, 3)}
ODD = {**COLLATE(rows_of([3, 4])), "extra": torch.zeros(5)}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (LISTED, r"`images` \(\(5, 3\)\) has no entry per sample in a batch of 2.*rules="),
        (ODD, r"`extra` \(5,\) has no entry for each of 7 tokens or of 2 samples"),
        (
            {"input_ids": torch.ones(3, 1), "past_key_values": DynamicCache()},
            r"`past_key_values` \(DynamicCache\) has no entry",
        ),
        ({"a": torch.ones(2), "b": torch.ones(3)}, "cannot tell how many samples a batch has"),
        (3, "a batch of type int cannot be split"),
        (IMAGES, "cannot tell which images belong to which sample"),
    ],
)
def test_what_fits_no_rule_is_refused_with_the_way_out(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        take(batch, 0, 1)


def test_rules_of_ones_own_decide_and_images_must_add_up() -> None:
    of_images = BatchSplitter(
        rules={"images": lambda value, batch, start, stop: value[2 * start : 2 * stop]}
    )
    assert len(of_images.take(LISTED, 0, 1)["images"]) == 2
    assert BatchSplitter(rules={"extra": lambda value, *_: value[:1]}).take(ODD, 0, 1)[
        "extra"
    ].tolist() == [0]
    with pytest.raises(
        ConfigError, match="2 image tokens, but another number of patches in `image_grid_thw`"
    ):
        BatchSplitter(vision=VisionTokens(image_token_id=9, merge_size=1)).take(IMAGES, 0, 1)


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_a_split_pack_has_the_gradient_of_the_whole(attention: str) -> None:
    batch, gradients = COLLATE(toys.samples("causal", 10)), []

    def mean_loss(part: dict[str, Any]) -> torch.Tensor:
        allocator.claim(part["input_ids"].numel())
        inputs = {name: value for name, value in part.items() if name != "seq_idx"}
        return training.summed_loss(model, inputs) / (part["labels"][:, 1:] != -100).sum()

    for share in (1.0, 0.4):
        model, allocator = training.llama(attention), Allocator(batch["input_ids"].numel() * share)
        OomSafeBackward(model, learned=LearningBudget())(mean_loss, batch)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert len(allocator.failures) >= 2
    assert (gradients[1] - gradients[0]).abs().max() < 1e-9 * gradients[0].abs().max()

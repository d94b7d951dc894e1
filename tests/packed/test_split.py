"""A packed batch that runs out of memory is split between its samples, and its gradient stays what it was."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DataCollatorWithFlattening

from dynagroup.errors import ConfigError
from dynagroup.oom import LearningBudget, OomSafeBackward
from dynagroup.oom.split import BatchSplitter, packed_borders, shape_of
from tests.allocator import Allocator
from tests.integrations import toys
from tests.packed import training

COLLATE = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)


def rows_of(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"input_ids": list(range(1, n + 1)), "labels": list(range(1, n + 1))} for n in lengths]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_a_part_is_what_the_collator_makes_of_its_samples(lengths: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(lengths) - 1))
    stop = data.draw(st.integers(start + 1, len(lengths)))
    batch = COLLATE(rows_of(lengths))
    assert BatchSplitter().num_samples(batch) == len(lengths)
    part, wanted = BatchSplitter().take(batch, start, stop), COLLATE(rows_of(lengths[start:stop]))
    assert part.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(part[name], value) if isinstance(value, torch.Tensor) else part[name] == value, name


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 3))
def test_positions_alone_show_the_borders_wherever_they_start(lengths: list[int], first: int) -> None:
    batch = DataCollatorWithFlattening(position_ids_start=first)(rows_of(lengths))
    assert packed_borders(batch) == [0, *np.cumsum(lengths).tolist()]


def test_a_padded_row_is_no_pack() -> None:
    ids = torch.ones(1, 5, dtype=torch.long)
    assert packed_borders({"input_ids": ids, "attention_mask": ids}) is None
    assert packed_borders({"input_ids": ids}) is None
    assert packed_borders({"input_ids": ids.expand(2, 5), "position_ids": ids.expand(2, 5)}) is None


def test_a_pack_costs_the_sum_of_its_tokens() -> None:
    shape = shape_of(COLLATE(rows_of([3, 7, 2])), 3)
    assert (shape.num_samples[0], shape.longest["tokens"][0], shape.total["tokens"][0]) == (3, 7, 12)


def test_what_belongs_to_neither_tokens_nor_samples_is_refused_by_name() -> None:
    batch = {**COLLATE(rows_of([3, 4])), "extra": torch.zeros(5)}
    with pytest.raises(ConfigError, match=r"`extra` \(5,\) has entries neither for the 7 tokens nor for the 2 samples"):
        BatchSplitter().take(batch, 0, 1)
    given_rule = BatchSplitter(rules={"extra": lambda value, batch, start, stop: value[:1]})
    assert given_rule.take(batch, 0, 1)["extra"].tolist() == [0]


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

"""Online loaders on real ranks with real workers; one start of ``torchrun`` runs them all."""

from typing import Any

import pytest
import torch.distributed as dist

from dynagroup import OnlineDataLoader, TokenBudget
from dynagroup.distributed import DistributedWorld
from tests.online.helpers import Tokens, all_ids, collate, lengths_of
from tests.online.test_loader_laws import assert_rows_have_all, labelled
from tests.online.test_pools import EVERY, LENGTHS, sizes_of
from tests.torchrun import on_ranks


def everything() -> dict[str, list[Any]]:
    """What one rank finds."""
    dist.init_process_group("gloo")
    dist.new_group([0])  # now the first rank is in a group more than the other
    world = DistributedWorld(dist.new_group([0, 1]))
    lengths = lengths_of(90, seed=4)
    # Only the first samples have images.
    labels = ["image" if i % 2 == 0 and i < 40 else "text" for i in range(90)]
    planned = labelled(world, lengths, labels, num_workers=2, samples_per_update=12)
    stream = labelled(world, lengths, labels, num_workers=2, stream=True)
    pools = OnlineDataLoader(
        Tokens(LENGTHS),
        TokenBudget(128),
        collate_fn=collate,
        num_workers=2,
        samples_per_update=12,
        grouping=4,
        shuffle=True,
    )
    return {"planned": list(planned), "stream": list(stream), "pools": list(pools)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[Any]]]:
    return on_ranks(2, everything)


@pytest.mark.parametrize("way", ["planned", "stream"])
def test_ranks_without_a_kind_idle_on_a_batch_of_it_that_another_lends(
    ranks: list[dict[str, list[Any]]], way: str
) -> None:
    first, second = ranks
    assert_rows_have_all(zip(first[way], second[way], strict=True), 90)


def test_a_stream_of_one_kind_idles_on_the_other(ranks: list[dict[str, list[Any]]]) -> None:
    streamed = ranks[1]["stream"]
    assert any(step.idle and step.kind == "image" for step in streamed)


def test_pools_of_updates_have_every_sample_once(ranks: list[dict[str, list[Any]]]) -> None:
    steps_by_rank = [rank["pools"] for rank in ranks]
    assert sizes_of(steps_by_rank) == [12] * 10
    assert all_ids(steps_by_rank) == EVERY

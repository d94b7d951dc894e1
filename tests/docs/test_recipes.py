"""What the recipes rely on beyond their own asserts: a sampler that is not seeded by the epoch, and losses without warnings."""

import pytest
import torch
from torch.utils.data import WeightedRandomSampler

from dynagroup import PlannedDataLoader, StateError, TokenBudget
from dynagroup.update.loss_check import check_losses

LENGTHS = [3 + (7 * i) % 40 for i in range(48)]


def oversampled() -> PlannedDataLoader:
    generator = torch.Generator().manual_seed(0)
    return PlannedDataLoader(
        LENGTHS,
        LENGTHS,
        TokenBudget(128),
        samples_per_update=8,
        sampler=WeightedRandomSampler([1.0] * 48, num_samples=48, generator=generator),
        collate_fn=list,
        weigh="samples",
    )


def test_a_sampler_that_is_not_seeded_by_the_epoch_is_refused_after_a_resume_and_told_how():
    loader = oversampled()
    list(loader)
    next(iter(loader))  # in the second epoch
    with pytest.raises(StateError, match="give it a method set_epoch that seeds it by the epoch"):
        oversampled().load_state_dict(loader.state_dict())


def test_several_losses_are_compared_without_a_warning():
    loss = torch.ones(1, requires_grad=True)[0]
    torch.set_warn_always(True)
    try:
        check_losses({"one": loss, "two": loss}, {"one": "samples", "two": "labels"}, 2 * loss)
    finally:
        torch.set_warn_always(False)

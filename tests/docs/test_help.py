"""``help()`` of what users fill in explains every argument, and says what it counts."""

from __future__ import annotations

import inspect
import re

import pytest

from dynagroup import LengthAwareBatchSampler, MemoryBudget, OnlineDataLoader, PlannedDataLoader, TokenBudget
from dynagroup.integrations.config import DynagroupConfig

EXPLAINED = [DynagroupConfig, OnlineDataLoader, PlannedDataLoader, LengthAwareBatchSampler, TokenBudget, MemoryBudget]


def explained(thing: type) -> dict[str, str]:
    """Arguments in the docstring's section, with their text."""
    section = (inspect.getdoc(thing) or "").split("Args:\n")[1].split("\n\n")[0]
    found = re.findall(r"^    (\*{0,2}\w+(?:, \w+)*): ((?:.*\n?)(?:^     .*\n?)*)", section, re.M)
    return {name.strip("* "): text for names, text in found for name in names.split(",")}


@pytest.mark.parametrize("thing", EXPLAINED, ids=lambda thing: thing.__name__)
def test_every_argument_is_explained(thing):
    arguments = [name for name in inspect.signature(thing).parameters if name != "self"]
    texts = explained(thing)
    assert [name for name in arguments if name not in texts] == []
    assert [name for name in texts if name not in arguments] == []
    assert [name for name in arguments if len(texts[name].split()) < 4] == []

"""Arguments are checked in one place; every refusal names the value."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dynagroup.errors import ConfigError
from dynagroup.validation import check_choice, check_int, check_number


@pytest.mark.parametrize("value", [True, 0, 1.0, "8", None, 1 << 63])
def test_an_int_is_an_int(value):
    with pytest.raises(ConfigError, match=r"`window` must be an int of at (least|most) .*, but is "):
        check_int("window", value)


def test_numpy_integers_become_plain_ones_so_that_states_can_be_saved():
    assert json.dumps(check_int("seed", np.int32(7), least=0)) == "7"


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1", 1.5])
def test_a_share_is_within_its_bounds(value):
    with pytest.raises(ConfigError, match="`headroom` must be"):
        check_number("headroom", value, most=1.0)


def test_a_choice_is_one_of_its_choices():
    with pytest.raises(ConfigError, match="`uneven` must be one of 'repeat', 'drop', but is 'stop'"):
        check_choice("uneven", "stop", ("repeat", "drop"))
    with pytest.raises(ConfigError, match="must be one of"):
        check_choice("flag", 1, (True, None))

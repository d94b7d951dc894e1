import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.update.schedule import UpdateSizes, linear_ramp, scale_learning_rate


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_rules_of_the_learning_rate(rule, expected):
    found = scale_learning_rate(0.1, samples_per_update=64, base_samples_per_update=16, rule=rule)
    assert found == pytest.approx(expected)


def test_a_ramp_keeps_to_its_multiple_and_goes_down_too():
    assert [linear_ramp(8, 32, num_updates=4, multiple_of=8)(u, None) for u in range(5)] == [8, 8, 16, 24, 32]
    assert [linear_ramp(32, 8, num_updates=3)(u, None) for u in range(5)] == [32, 24, 16, 8, 8]


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(0, 60), st.booleans())
def test_epochs_of_one_size_are_counted_as_if_they_were_walked(samples, count, drop_last):
    counted = UpdateSizes(samples, lambda: count, drop_last=drop_last)
    walked = UpdateSizes(lambda update, current: samples, lambda: count, drop_last=drop_last)
    for epoch in range(8):
        assert counted.start(epoch) == walked.start(epoch)
        assert counted.num_updates(epoch) == walked.num_updates(epoch) == len(list(walked.cursors(walked.start(epoch))))


def test_a_change_holds_from_its_update_on_in_later_epochs_too():
    sizes = UpdateSizes(4, lambda: 10)
    assert sizes.change(next(sizes.cursors(sizes.start(0))), 5) == 1
    assert [stop - start for epoch in (0, 1) for start, stop, _ in sizes.spans(sizes.start(epoch))] == [4, 5, 1, 5, 5]
    assert UpdateSizes(8, lambda: 1000).start(10**6).update == 125 * 10**6

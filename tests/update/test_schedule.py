import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup import ConfigError
from dynagroup.update.schedule import UpdateSizes, adabatch, constant, doubling, linear_ramp, scale_learning_rate


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: constant(0), "`samples` must be an int of at least 1, but is 0"),
        (lambda: linear_ramp(8, 16, num_updates=0), "`num_updates` must be"),
        (lambda: doubling(8, milestones=(4, 4)), "`milestones` must be growing"),
        (lambda: adabatch(8, interval=10, growth=1), "`growth` must be at least 2"),
        (lambda: adabatch(8, interval=10, most=4), "`most` must be at least `first`"),
        (lambda: adabatch(8, interval=10, decay=0), "`decay` must be"),
        (lambda: scale_learning_rate(1, samples_per_update=0, base_samples_per_update=1), "must be greater than 0"),
        (
            lambda: scale_learning_rate(1, samples_per_update=1, base_samples_per_update=1, rule="cubic"),
            "`rule` must be",
        ),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_rules_of_the_learning_rate(rule, expected):
    found = scale_learning_rate(0.1, samples_per_update=64, base_samples_per_update=16, rule=rule)
    assert found == pytest.approx(expected)


def test_a_ramp_keeps_to_its_multiple_and_goes_down_too():
    assert [linear_ramp(8, 32, num_updates=4, multiple_of=8)(u, None) for u in range(5)] == [8, 8, 16, 24, 32]
    assert [linear_ramp(32, 8, num_updates=3)(u, None) for u in range(5)] == [32, 24, 16, 8, 8]


def test_adabatch_decays_on_when_it_cannot_grow():
    schedule = adabatch(8, interval=1, growth=2, decay=0.5, most=16)
    assert [schedule(u, None) for u in range(4)] == [8, 16, 16, 16]
    assert [schedule.learning_rate_factor(u) for u in range(4)] == [1.0, 0.5, 0.125, 0.03125]


RAMPS = st.one_of(
    st.builds(constant, st.integers(1, 40)),
    st.builds(linear_ramp, st.integers(1, 9), st.integers(1, 30), num_updates=st.integers(1, 20)),
    st.builds(doubling, st.integers(1, 4), milestones=st.sampled_from([(), (3,), (2, 9)])),
    st.builds(adabatch, st.just(2), interval=st.integers(1, 4), most=st.sampled_from([2, 8, 9])),
)


@settings(max_examples=100)
@given(RAMPS, st.integers(0, 60), st.booleans(), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=2))
def test_epochs_of_settled_sizes_are_counted_as_if_they_were_walked(schedule, count, drop_last, changes):
    """A schedule that says from when it is settled, against the same one that does not; also changed at run time."""
    counted = UpdateSizes(schedule, lambda: count, drop_last=drop_last)
    walked = UpdateSizes(lambda update, current: schedule(update, current), lambda: count, drop_last=drop_last)
    for sizes in (counted, walked):
        for epoch, samples in sorted(changes):
            sizes.change(sizes.start(epoch), samples)
    for epoch in range(8):
        assert counted.start(epoch) == walked.start(epoch)
        assert counted.num_updates(epoch) == walked.num_updates(epoch) == len(list(walked.cursors(walked.start(epoch))))


def test_epoch_one_million_is_counted_at_once():
    assert UpdateSizes(linear_ramp(8, 64, num_updates=50), lambda: 1000).start(10**6).update == 16_000_023

"""Advice of ``lightning-hetero doctor`` by given findings: when it is given, when it is not, and its figures."""

import pytest

from lightning_hetero.cli.doctor.advice import gain_over_even, speed_advice
from lightning_hetero.cli.doctor.checkup import Checkup
from tests.cli.findings import speed


def test_a_slow_rank_is_named_with_the_gain():
    found = speed_advice(Checkup((), 3, speeds={0: speed(2e12), 1: speed(2.1e12), 2: speed(1e12)}))
    assert found == [
        "rank 2 is 2.1 times slower than the fastest: with even batches the others wait. "
        'strategy="hetero_ddp" would give 1.7x, as far as computing limits the steps'
    ]
    assert gain_over_even([2.0, 2.1, 1.0]) == pytest.approx(5.1 / 3, rel=2e-3)
    assert "even batches are right" in speed_advice(Checkup((), 2, speeds={0: speed(1.0), 1: speed(1.02)}))[0]
    assert speed_advice(Checkup((), 1, speeds={0: speed(1.0)})) == []
    several = {0: speed(10.0), **{i: speed(1.6 - 0.1 * i) for i in range(1, 4)}}
    (three,) = speed_advice(Checkup((), 1, speeds=several))
    assert three.startswith("device 3 is 7.69 times slower, device 2 is 7.14 times slower, device 1 is 6.67 times")
    assert "more are slower" not in three
    (five,) = speed_advice(Checkup((), 1, speeds={**several, 4: speed(2.0), 5: speed(3.0)}))
    assert "device 4" not in five
    assert "than the fastest, and 2 more are slower, too: with even" in five


@pytest.mark.parametrize(
    ("speeds", "uneven"),
    [((1.08, 1.0), False), ((1.2, *[1.0] * 9), False), ((1.5, *[1.0] * 9), True), ((1.0, 0.9), True)],
    ids=["little slower", "a little to gain", "one fast worker", "slower"],
)
def test_uneven_batches_are_advised_where_they_gain(speeds, uneven):
    (text,) = speed_advice(Checkup((), len(speeds), speeds=dict(enumerate(map(speed, speeds)))))
    assert ("hetero_ddp keeps them" in text) is not uneven
    assert ("would give" in text) is uneven

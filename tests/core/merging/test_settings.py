"""Settings of Adaptive SGD."""

import pytest

from lightning_hetero.core.merging.settings import AdaptiveSettings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"max_batch_size": 8, "min_batch_size": 9}, "min_batch_size=9 is above"),
        ({"max_batch_size": 8, "beta": 0.0}, "beta=0.0"),
        ({"max_batch_size": 8, "momentum": 1.0}, "momentum=1.0"),
        ({"max_batch_size": 8, "perturbation": 1.5}, "perturbation=1.5"),
        ({"max_batch_size": 8, "perturbation_threshold": -1}, "perturbation_threshold=-1"),
        ({"max_batch_size": 8, "damped": "no"}, "damped='no'"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveSettings(**arguments)

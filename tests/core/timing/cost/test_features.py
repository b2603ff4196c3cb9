"""Features of a share, by hand."""

import pytest

from lightning_hetero.core.timing.cost.features import FEATURES, share_features


@pytest.mark.parametrize(
    ("costs", "expected"),
    [([], (0.0,) * 5), ([2.0], (1.0, 2.0, 2.0, 4.0, 4.0)), ([1.0, 3.0, 2.0], (3.0, 6.0, 9.0, 14.0, 27.0))],
)
def test_features_of_a_share(costs, expected):
    assert share_features(costs) == expected
    assert len(FEATURES) == len(expected)

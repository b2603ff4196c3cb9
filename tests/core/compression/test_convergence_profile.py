"""The file of a convergence profile."""

import json

import pytest

from lightning_hetero.core.compression.convergence_profile import ConvergenceProfile

PROFILE = ConvergenceProfile(16, 256, 0.7, ((0.5, 32, 0.1), (0.9, 64, 0.3)))


def test_file_round_trip(tmp_path):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert ConvergenceProfile.load(path) == PROFILE
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no convergence profile"),
        ("[1]", "no convergence profile"),
        ("{}", "no convergence profile"),
        ("[" * 100_000, "no convergence profile"),
        (json.dumps({**json.loads(PROFILE.to_json()), "points": [[0.5]]}), "no convergence profile"),
        (json.dumps({**json.loads(PROFILE.to_json()), "format": 9}), "format 9"),
        (json.dumps({**json.loads(PROFILE.to_json()), "points": []}), "points is empty"),
        (json.dumps({**json.loads(PROFILE.to_json()), "points": [[2.0, 32, 0.1]]}), "out of range"),
        (json.dumps({**json.loads(PROFILE.to_json()), "baseline": 0}), "baseline=0"),
        (json.dumps({**json.loads(PROFILE.to_json()), "max_total": 8}), "max_total=8"),
    ],
)
def test_what_is_no_profile_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        ConvergenceProfile.from_json(text)

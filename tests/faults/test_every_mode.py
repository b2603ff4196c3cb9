"""Every fault in every mode that promises something about it: the whole table, with one invariant for each fault."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.faults.faults import FAULTS
from tests.faults.harness import train
from tests.faults.invariants import INVARIANTS, check
from tests.faults.modes import MODES
from tests.faults.pairs import IN_FILES, IN_RUNS, LEFT_OUT, PAIRS


@cache
def undisturbed(mode):
    """A run without any fault, which all faults in this mode share."""
    with TemporaryDirectory() as folder:
        return train(None, mode, Path(folder))


@pytest.mark.parametrize(("fault", "mode"), IN_RUNS, ids=str)
def test_its_invariant_holds(fault, mode, tmp_path):
    check(fault, mode, train(fault, mode, tmp_path), undisturbed(mode))


@pytest.mark.parametrize(("fault", "mode"), IN_FILES, ids=str)
def test_a_damaged_checkpoint_is_a_named_error_on_every_rank(fault, mode, tmp_path):
    path = tmp_path / "saved.ckpt"
    assert not train(None, mode, tmp_path / "first", save={4: str(path)}).errors
    fault.damage(path, tmp_path / "second")
    check(fault, mode, train(None, mode, tmp_path / "second", resume=str(path)), None)


# the table itself


def test_every_fault_has_an_invariant():
    assert {type(fault) for fault in FAULTS} == set(INVARIANTS)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_every_fault_is_in_two_modes(fault):
    assert len({mode for of, mode in PAIRS if of == fault}) >= 2


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_sees_six_faults(mode):
    assert len({type(fault) for fault, of in PAIRS if of == mode}) >= 6


def test_what_is_left_out_exists():
    for kinds, modes, _ in LEFT_OUT:
        assert set(modes) <= set(MODES)
        assert all(any(str(fault).startswith(kind) for fault in FAULTS) for kind in kinds)

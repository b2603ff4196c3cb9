"""What ends a process is known when it ends."""

import subprocess
import sys

import pytest

from lightning_hetero.frontend.report.process_end import ProcessEnd

SCRIPT = """
import atexit, sys
from lightning_hetero.frontend.report.process_end import ProcessEnd

sys.excepthook = lambda *error: None  # other packages replace it as well
end = ProcessEnd()
atexit.register(lambda: sys.stdout.write(repr(end.error)))
{}
"""

ENDS = {
    "raise ArithmeticError('boom')": "ArithmeticError('boom')",
    "raise KeyboardInterrupt": "KeyboardInterrupt()",
    "sys.exit(3)": "SystemExit(3)",
    "try: 1 / 0\nexcept ArithmeticError: sys.exit(1)": "ZeroDivisionError('division by zero')",  # as launchers do
    "try: 1 / 0\nexcept ArithmeticError: pass": "None",
    "try: 1 / 0\nexcept ArithmeticError: pass\nsys.exit(0)": "None",
}


@pytest.mark.parametrize("how", ENDS)
def test_an_error_that_nobody_catches_is_known_when_the_process_ends(how):
    made = subprocess.run([sys.executable, "-c", SCRIPT.format(how)], capture_output=True, text=True)
    assert made.stdout == ENDS[how], made.stderr


@pytest.fixture
def end():
    before = sys.exit
    made = ProcessEnd()
    yield made
    made.close()
    assert sys.exit is before


def _fails(end):
    try:
        raise ArithmeticError("boom")
    finally:
        assert repr(end.error) == "ArithmeticError('boom')"


def test_an_error_that_is_being_handled_ends_the_run(end):
    with pytest.raises(ArithmeticError, match="boom"):
        _fails(end)
    assert end.error is None


@pytest.mark.parametrize("ordinary", [StopIteration(), SystemExit(0), SystemExit(None)])
def test_what_ends_a_loop_or_succeeds_is_no_error(end, ordinary):
    try:
        raise ordinary
    except BaseException:  # noqa: BLE001 - SystemExit is none of Exception
        assert end.error is None


def test_an_exit_that_somebody_catches_ends_no_run_that_goes_on(end):
    with pytest.raises(SystemExit, match="wrong option"):
        sys.exit("wrong option")
    assert str(end.error) == "wrong option"
    end.go_on()
    assert end.error is None


def test_an_error_of_before_is_not_that_of_the_run(monkeypatch):
    monkeypatch.setattr(sys, "last_value", ArithmeticError("earlier"), raising=False)
    try:
        raise MemoryError
    except MemoryError:
        end = ProcessEnd()
        assert end.error is None  # trains again in the handler of an error
    monkeypatch.setattr(sys, "last_value", ArithmeticError("later"), raising=False)
    assert str(end.error) == "later"
    end.close()


def test_another_replacement_of_the_exit_stays(end, monkeypatch):
    monkeypatch.setattr(sys, "exit", lambda status=None: None)
    other = sys.exit
    end.close()
    assert sys.exit is other

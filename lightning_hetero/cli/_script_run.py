"""Runs of a user's script that obeys an order in its environment (:mod:`lightning_hetero.probe_job`), and answers."""

import argparse
import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from lightning_hetero.cli._parser import Parser, option
from lightning_hetero.probe_job import VARIABLE, ProbeOrder

__all__ = ["ProbeError", "RefusedError", "ScriptRun", "add_script_options", "file_name", "misplaced", "whole_option"]

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class RunSettings:
    """Limits of the script's runs.

    Args:
        shown_lines: lines of a failed script's output to show.
        end_s: seconds that a script has to end before it is killed; torchrun needs 30 to end its workers.
    """

    shown_lines: int = 30
    end_s: float = 40.0


SETTINGS = RunSettings()


class ProbeError(RuntimeError):
    """Error of a probe training that ended without an answer."""


class RefusedError(ProbeError):
    """Error of a script that cannot do what it was ordered; the message is its reason."""


class ScriptRun:
    """Starter of a script with orders, one run at a time.

    Args:
        command: command that starts the script.
        seed: seed of the samples' order, for scripts that do not set one.
        timeout: seconds after which a run has failed.
    """

    def __init__(self, command: Sequence[str], *, seed: int = 0, timeout: float = 3600.0) -> None:
        self.command, self.seed, self.timeout = list(command), seed, timeout

    def ask(
        self, order: Callable[[str], ProbeOrder], read: Callable[[Path], Answer], what: str, too_long: str
    ) -> Answer:
        """Run the script with an order and return its answer.

        Args:
            order: order whose answer goes to a path.
            read: reads the answer.
            what: subject of the error.
            too_long: advice for a run that takes too long.

        Raises:
            ProbeError: if the script fails, or does not answer.
            RefusedError: if it says why it cannot.
        """
        with tempfile.TemporaryDirectory(prefix="lightning-hetero-probe-") as folder:
            answer = Path(folder, "answer.json")
            with open(Path(folder, "output"), "w+", encoding="utf-8", errors="replace") as output:
                code = self._execute(order(str(answer)), output)
                output.seek(0)
                tail = "\n".join(output.read().splitlines()[-SETTINGS.shown_lines :])
            if code == 0 and answer.is_file():
                try:
                    return read(answer)
                except (TypeError, ValueError, RecursionError) as error:
                    raise ProbeError(
                        f"{what} gave an answer that cannot be read ({error}). Does the script run with the same "
                        "version of lightning-hetero?"
                    ) from error
            refusal = ProbeOrder.refusal(answer)
        if refusal is not None:
            raise RefusedError(refusal)
        why = {
            None: f"was not done within {self.timeout:g} s; {too_long}",
            0: "ended without an answer; does its Trainer fit with strategy='hetero_ddp'?",
        }.get(code, f"ended with exit code {code}")
        raise ProbeError(f"{what} {why}\n$ {shlex.join(self.command)}\n{tail}")

    def _execute(self, order: ProbeOrder, output: IO[str]) -> int | None:
        """Run the script and return its exit code, ``None`` if it took too long; none of its processes is left."""
        try:
            process = subprocess.Popen(
                self.command,
                env={**os.environ, VARIABLE: order.announce(), "PL_GLOBAL_SEED": str(self.seed)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ProbeError(f"{self.command[0]!r} cannot be started: {error.strerror}.") from None
        try:
            return process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_group(process)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Give the other workers time to end, and kill those that do not."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + SETTINGS.end_s
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def add_script_options(parser: Parser, *, timeout: float, longest: str, launchers: str = "", where: str = "") -> None:
    """Add the options that say which script runs, by which command, and for how long.

    Args:
        parser: of the command.
        timeout: seconds by default.
        longest: what ``--timeout`` bounds.
        launchers: examples of what starts the script.
        where: condition under which the script trains.
    """
    add = parser.add_argument
    longest = f"longest {longest} (default {timeout:.0f})"
    add("--timeout", type=seconds_option, default=timeout, metavar="SECONDS", help=longest)
    starts = f"what starts the script{launchers} (default: this Python)"
    add("--launcher", type=option(launcher), default=[sys.executable], metavar="COMMAND", help=starts)
    add("script", type=option(file_name), help=f"script that trains with strategy='hetero_ddp'{where}")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def whole_option(minimum: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``minimum`` on."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text} is out of range; give an integer >= {minimum}")
        return value

    return number


def seconds_option(text: str) -> float:
    """Return seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is out of range; give seconds above 0")
    return value


def file_name(text: str) -> Path:
    """Return the path of a file.

    Raises:
        ValueError: if the text is empty.
    """
    if not text.strip():
        raise ValueError(f"{text!r} is no name of a file.")
    return Path(text)


def launcher(text: str) -> list[str]:
    """Return the words of a command.

    Raises:
        ValueError: if there are none, or a quote is not closed.
    """
    try:
        command = shlex.split(text)
    except ValueError:
        command = []
    if not command:
        raise ValueError(f"{text!r} is no command; give what starts the script, such as 'srun python'.")
    return command


def misplaced(command: str, options: argparse.Namespace) -> str:
    """Return a hint for options of a command that stand after the script, which got them."""
    own = {f"--{name.replace('_', '-')}" for name in vars(options).keys() - {"script", "arguments"}}
    found = [text for text in options.arguments if text.split("=")[0] in own]
    if not found:
        return ""
    return (
        f"\n{found[0]} stands after the script, so the script got it. If it is meant for `{command}`, put it before "
        f"the script: lightning-hetero {command} {found[0]} ... script.py."
    )

"""Order of one probe training by ``lightning-hetero profile-convergence`` or ``profile``, and the script's answer.

The order is JSON in the environment variable :data:`VARIABLE`, the answer a file of JSON that rank 0 writes. The script
may be started by anything that hands the variable to all ranks.
"""

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lightning_hetero.core.validation import check_choice, check_int, check_number, check_sizes
from lightning_hetero.core.whole_file import write_file

__all__ = ["VARIABLE", "DeviceReport", "ProbeOrder", "ProbeReport"]

VARIABLE = "LIGHTNING_HETERO_PROBE"


@dataclass(frozen=True)
class ProbeOrder:
    """One short training in place of the script's own.

    Args:
        report: path of the file for the answer.
        samples: samples to train on, of all ranks together; 0 trains on none and only reports on the script.
        total: total batch size, ``None`` for the script's own.
        rate: compression rate, 0 to 1: one minus the density; 0 sends everything.
        staleness: whether gradients are stale, 0 or 1.
        steps: steps to time at each of several batch sizes on one worker, ``>= 0``; 0 measures no times.
        sizes: these sizes, in order; none for a range around the script's own.
        host: name of the host of the process that gave the order.
        pid: number of that process.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of range.

    Example:
        >>> order = ProbeOrder("answer.json", samples=512, total=64, rate=0.9, staleness=1)
        >>> ProbeOrder.from_environment({VARIABLE: order.to_json()}) == order
        True
    """

    report: str
    samples: int = 0
    total: int | None = None
    rate: float = 0.0
    staleness: int = 0
    steps: int = 0
    sizes: tuple[int, ...] = ()
    host: str = ""
    pid: int = 0

    def __post_init__(self) -> None:
        check_int("samples", self.samples, minimum=0)
        if self.total is not None:
            check_int("total", self.total, minimum=1)
        check_number("rate", self.rate, low=0.0, high=1.0)
        check_choice("staleness", self.staleness, (0, 1))
        check_int("steps", self.steps, minimum=0)
        object.__setattr__(self, "sizes", check_sizes("sizes", self.sizes, minimum=1) if self.sizes else ())

    def to_json(self) -> str:
        """Return the order as the value of the variable."""
        return json.dumps(asdict(self))

    def announce(self) -> str:
        """Write the order, with this process's host and id, beside the answer's path; return the variable's value.

        A variable can outlive the process that set it, in a shell or a job description. So a training script obeys an
        order only if it finds the written copy, by a process that is alive as far as the script can see.
        """
        text = replace(self, host=socket.gethostname(), pid=os.getpid()).to_json()
        self._written.write_text(text, encoding="utf-8")
        return text

    def refuse(self, reason: str) -> None:
        """Write why the script cannot do it, for :meth:`refusal`; nothing where the answer's folder is not visible."""
        with contextlib.suppress(OSError):
            Path(f"{self.report}.refused").write_text(reason, encoding="utf-8")

    @staticmethod
    def refusal(report: str | Path) -> str | None:
        """Return why a script could not do what it was ordered, ``None`` if it did not say.

        Args:
            report: path of the answer.
        """
        try:
            return Path(f"{report}.refused").read_text(encoding="utf-8")
        except OSError:
            return None

    @property
    def _written(self) -> Path:
        return Path(f"{self.report}.order")

    def why_left_over(self, *, answers: bool) -> str | None:
        """Say why nobody waits for the answer any more, ``None`` if somebody may.

        Args:
            answers: whether this process writes the answer. Other ranks may run where its folder is not visible.

        Example:
            >>> print(ProbeOrder("/no/such/folder/answer.json").why_left_over(answers=True))
            there is no /no/such/folder/answer.json.order
        """
        here = socket.gethostname() == self.host
        if not (answers or here or self._written.parent.is_dir()):
            return None
        try:
            written = self._written.read_text(encoding="utf-8")
        except OSError:
            return f"there is no {self._written}"
        if written != self.to_json():
            return f"{self._written} holds another order"
        if here and not _alive(self.pid):
            return f"process {self.pid}, which gave the order, is gone"
        return None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "ProbeOrder | None":
        """Read the order that the environment carries, ``None`` without one.

        Raises:
            ValueError: if the variable holds no order.
        """
        text = environment.get(VARIABLE)
        if not text:
            return None
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{VARIABLE}={text[:400]!r} is no order for a probe training ({error}). Unset it; it is set by "
                "`lightning-hetero profile-convergence` and `profile` only."
            ) from error


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@dataclass(frozen=True)
class ProbeReport:
    """Answer of a script: facts about the script, and the result of its probe training.

    Args:
        loss: mean training loss over the last quarter of the samples, ``None`` if it did not train.
        samples: samples that it trained on.
        staleness: whether gradients were stale, 0 or 1; a script may not allow it.
        world_size: number of ranks.
        total: total batch size that ran.
        dataset: samples of an epoch.
        min_local: fewest samples that a rank can run.

    Example:
        >>> ProbeReport(0.25, samples=640, staleness=0, world_size=2, total=64, dataset=5000, min_local=1).loss
        0.25
    """

    loss: float | None
    samples: int
    staleness: int
    world_size: int
    total: int
    dataset: int
    min_local: int

    def write(self, path: str | Path) -> None:
        """Write the answer, whole or not at all."""
        _write(path, asdict(self))

    @classmethod
    def read(cls, path: str | Path) -> "ProbeReport":
        """Read the answer in a file.

        Raises:
            FileNotFoundError: if nobody answered.
        """
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class DeviceReport:
    """Answer of a script that timed its worker at several batch sizes.

    Args:
        name: of the device.
        rows: of each timed step its size, and the seconds outside of the backward pass, in it, and until its first
            bucket was ready.
        memory: most samples that fit, ``None`` if that was not found out.
        parameters: number of parameters that are trained.
        gradient_bytes: bytes of their gradients.
        total: the script's own batch size.
        dataset: samples of an epoch.

    Example:
        >>> DeviceReport("gpu", [[8, 0.01, 0.02, 0.002]], None, 10, 40, 8, 1000).rows[0][0]
        8
    """

    name: str
    rows: list[list[float]]
    memory: int | None
    parameters: int
    gradient_bytes: int
    total: int
    dataset: int

    def write(self, path: str | Path) -> None:
        """Write the answer, whole or not at all."""
        _write(path, asdict(self))

    @classmethod
    def read(cls, path: str | Path) -> "DeviceReport":
        """Read the answer in a file.

        Raises:
            FileNotFoundError: if nobody answered.
        """
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


def _write(path: str | Path, values: Mapping[str, object]) -> None:
    write_file(path, json.dumps(values).encode())

"""Course of a checkup: meet the other ranks, gather facts, time devices and links, write what was found."""

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from types import FrameType
from typing import Any

import torch

from lightning_hetero.cli.doctor.autoload import LONGEST_S, autoload_of
from lightning_hetero.cli.doctor.checkup import Checkup
from lightning_hetero.cli.doctor.document import document
from lightning_hetero.cli.doctor.facts import SOCKETS, ProcessFacts, process_facts, unmet, vulnerable
from lightning_hetero.cli.doctor.group import Failure, Ranks, RanksError
from lightning_hetero.cli.doctor.job import Job, group_problems, interface_problems, job_of
from lightning_hetero.cli.doctor.link import LinkFacts, measure_pairs, measure_sums
from lightning_hetero.cli.doctor.speed import measure_speed
from lightning_hetero.cli.doctor.text import checkup_text
from lightning_hetero.comm.agreement.backends import new_group
from lightning_hetero.core.link.clusters import clusters_by_time

__all__ = ["Examination", "devices_of", "examine"]

VARIABLES = (
    *("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS"),
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCH_DEVICE_BACKEND_AUTOLOAD", "ACCELERATE_USE_HETERO"),
    *(*SOCKETS, "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"),
)


def examine(options: argparse.Namespace) -> int:
    """Check this process and, under torchrun, the others; rank 0 writes the result.

    Returns:
        0 if everything was checked, 1 if a check or a rank failed.
    """
    examination = Examination(options, os.environ)
    with _ended_by_launcher(examination):
        try:
            examination.go()
            examination.ranks.leave()
        except RanksError as error:
            examination.fail(str(error))
    failures = examination.checkup.failures
    if examination.speaks:
        examination.write()
        return 1 if failures else 0
    sys.stderr.writelines(f"lightning-hetero doctor: rank {examination.job.rank}: {text}\n" for text in failures)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # it ends rank 0, which has more to say, if another one fails
    return 1 if failures and not under_torchrun else 0


class Examination:
    """Checkup that grows step by step, so that what was found can be written whatever fails.

    Args:
        options: of the command.
        environment: variables of this process.
    """

    def __init__(self, options: argparse.Namespace, environment: Mapping[str, str]) -> None:
        self.options, self.environment = options, environment
        self.job = job_of(environment)
        self.ranks = Ranks(self.job, timeout=options.timeout, on_hang=self._write_anyway)
        given = {name: environment[name] for name in VARIABLES if name in environment}
        self.checkup = Checkup(
            (),
            self.job.world_size,
            options.seconds,
            options.precision,
            environment=given,
            problems=self.job.problems,
        )

    @property
    def speaks(self) -> bool:
        """True if this process writes what was found."""
        return self.job.rank == 0 or self.job.alone

    def go(self) -> None:
        """Do all checks.

        Raises:
            RanksError: if a rank is lost.
        """
        try:
            self.ranks.join(self.environment)
        except RanksError as error:
            if not self.speaks:
                raise
            self.fail(str(error))
            self.job = Job(local_rank=self.job.local_rank)
            self.ranks = Ranks(self.job, timeout=self.options.timeout, on_hang=self._write_anyway)
            self._add(world_size=1)
        self._tell()
        devices = devices_of(self.job)
        self._facts(devices)
        self._autoload()
        self._speeds(devices)
        if not self.job.alone:
            self._link()

    def fail(self, sentence: str) -> None:
        """Note a check that failed."""
        self._add(failures=(*self.checkup.failures, sentence))

    def write(self) -> None:
        """Write what was found."""
        if self.options.json:
            json.dump(document(self.checkup, hosts=self.options.hosts), sys.stdout, indent=2)
            sys.stdout.write("\n")
        else:
            sys.stdout.write(checkup_text(self.checkup, hosts=self.options.hosts))
        sys.stdout.flush()

    def _add(self, **changes: Any) -> None:
        self.checkup = replace(self.checkup, **changes)

    def _tell(self) -> None:
        """Say on a terminal that this takes some seconds."""
        if self.speaks and not self.options.json and sys.stderr.isatty():
            sys.stderr.write(f"checking for about {10 + self.options.seconds:.0f} s ...\n")

    def _facts(self, devices: list[torch.device]) -> None:
        def own() -> list[ProcessFacts]:
            if self.job.alone:
                return [process_facts(place, device, place) for place, device in enumerate(devices)]
            return [process_facts(self.job.rank, devices[0], self.job.local_rank)]

        rows = tuple(row for rows in self._gathered("facts", own) for row in rows)
        if not rows:
            return
        try:
            requires = metadata.requires("lightning-hetero") or []
        except metadata.PackageNotFoundError:
            requires = []
        known = dict.fromkeys(text for row in rows for text in vulnerable(row.versions))
        problems = [*known, *unmet(rows[0].versions, requires), *interface_problems(rows)]
        if self.checkup.world_size > 1:
            problems = [*group_problems(rows), *problems]
        self._add(rows=rows, problems=(*self.checkup.problems, *problems))

    def _autoload(self) -> None:
        def own() -> Any:
            return autoload_of() if self.speaks else None

        for found in self._gathered("autoload", own, LONGEST_S):
            if found is not None:
                unknown = () if found.works else (found.sentence(),)
                self._add(autoload=found, problems=(*self.checkup.problems, *unknown))

    def _speeds(self, devices: list[torch.device]) -> None:
        def timed(device: torch.device) -> Callable[[], Any]:
            return lambda: measure_speed(device, self.options.seconds, self.options.precision)

        for place, device in enumerate(devices):
            found = self.ranks.gather(f"speed of {device}" if self.job.alone else "speed", timed(device), self._long)
            for rank, value in enumerate(found, start=place):
                if isinstance(value, Failure):
                    self.fail(f"{self.checkup.unit} {rank}: no speed: {value.text}.")
                else:
                    self._add(speeds={**self.checkup.speeds, rank: value})

    def _link(self) -> None:
        control = self.ranks.control
        device, backend = self._averaging()
        pairs = self._gathered("pairs", lambda: measure_pairs(control))
        if not pairs or len(pairs) < self.job.world_size:
            return
        latency, rate, usual = pairs[0]
        link = LinkFacts(backend, _rows(latency), _rows(rate), clusters=clusters_by_time(usual))
        self._add(link=link)

        def sums() -> Any:
            group = new_group(backend="nccl") if backend == "nccl" else None
            return tuple(measure_sums(control, device, group))

        for found in self._gathered("all-reduces", sums)[:1]:
            self._add(link=replace(link, sums=found))

    def _averaging(self) -> tuple[torch.device, str]:
        """Return the device and backend by which these ranks would average gradients."""
        found = {row.device.identity for row in self.checkup.rows if row.device.kind == "cuda"}
        if len(found) == self.job.world_size and torch.distributed.is_nccl_available():
            return devices_of(self.job)[0], "nccl"
        return torch.device("cpu"), "gloo"

    def _gathered(self, what: str, measure: Callable[[], Any], seconds: float = 0.0) -> list[Any]:
        """Return what the ranks have measured, and note those that failed."""
        found = self.ranks.gather(what, measure, seconds)
        for rank, value in enumerate(found):
            if isinstance(value, Failure):
                self.fail(f"{f'rank {rank}: ' if self.checkup.world_size > 1 else ''}{what}: {value.text}.")
        return [value for value in found if not isinstance(value, Failure)]

    @property
    def _long(self) -> float:
        return 3.0 * self.options.seconds

    def _write_anyway(self, sentence: str) -> None:
        self.fail(sentence)
        if self.speaks:
            self.write()
        else:
            sys.stderr.write(f"lightning-hetero doctor: {sentence}\n")
            sys.stderr.flush()


def devices_of(job: Job) -> list[torch.device]:
    """Return the device of a rank, or all GPUs of a process of its own; the CPU where there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return [torch.device("cpu")]
    if job.alone:
        return [torch.device("cuda", index) for index in range(count)]
    device = torch.device("cuda", job.local_rank % count)
    torch.cuda.set_device(device)
    return [device]


def _rows(values: Any) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, values.tolist()))


@contextlib.contextmanager
def _ended_by_launcher(examination: Examination) -> Iterator[None]:
    """Write what was found also if the launcher ends this process, which it does when another rank fails."""

    def end(_number: int, _frame: FrameType | None) -> None:
        examination.fail("the launcher ended this process, as it does when another rank fails; see its output.")
        if examination.speaks:
            examination.write()
        os._exit(1)

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # another thread than the main one
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""``lightning-hetero profile-convergence``: probe trainings of a script, and the profile that a controller loads.

Each probe is the script itself, started as usual; its strategy obeys an order in the environment
(:mod:`lightning_hetero.probe_job`).
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from lightning_hetero.cli._parser import Parser, UserError, option
from lightning_hetero.cli._script_run import (
    ProbeError,
    ScriptRun,
    add_script_options,
    file_name,
    misplaced,
    whole_option,
)
from lightning_hetero.core.compression.bayesian_search import profile_convergence
from lightning_hetero.core.compression.convergence_profile import ConvergenceProfile
from lightning_hetero.probe_job import ProbeOrder, ProbeReport

__all__ = ["ScriptProbes", "add_options", "ranges", "run"]


MIN_STEPS = 8
"""Fewest batches of a probe training; with fewer, neither compression nor staleness has an effect."""


def add_options(parser: Parser) -> None:
    """Add the options of ``profile-convergence``."""
    add = parser.add_argument
    add("--output", type=option(file_name), default=Path("convergence.json"), metavar="FILE", help="profile to write")
    add("--probes", type=whole_option(1), default=30, metavar="N", help="trainings besides the first (default 30)")
    add("--samples", type=whole_option(1), metavar="N", help="samples of a training (default: half an epoch)")
    add("--min-total", type=whole_option(1), metavar="N", help="least total batch (default: a quarter of the script's)")
    add("--max-total", type=whole_option(1), metavar="N", help="greatest total batch (default: 4 times the script's)")
    add("--seed", type=whole_option(0), default=0, metavar="N", help="of the choice of probes and the order of samples")
    launchers = ", such as 'torchrun --nproc_per_node=2'"
    add_script_options(parser, timeout=3600.0, longest="probe", launchers=launchers)


def run(options: argparse.Namespace) -> int:
    """Run probe trainings of a script and write the profile.

    Returns:
        0, or 1 if a probe training failed.

    Raises:
        UserError: if there is no such script, the output has no folder, or scikit-learn is not installed.
    """
    output, part = options.output, Path(f"{options.output}.partial")
    if not options.script.is_file():
        raise UserError(f"script={options.script} is no file; give the script that trains, then its arguments.")
    if not output.parent.is_dir():
        raise UserError(f"--output {output}: the folder {output.parent} does not exist. Make it, or give another file.")
    low, high = options.min_total, options.max_total
    if low is not None and high is not None and low > high:
        raise UserError(f"--min-total {low} is above --max-total {high}. Give the least total batch first.")
    if find_spec("sklearn") is None:
        raise UserError("profiling needs scikit-learn. Install it with: pip install 'lightning-hetero[demo]'")
    command = [*options.launcher, str(options.script), *options.arguments]
    probes = ScriptProbes(command, seed=options.seed, timeout=options.timeout)
    try:
        given = options.samples, options.min_total, options.max_total
        samples, low, high = ranges(None if None not in given else probes.describe(), *given)
        probes.take(samples)
        _say(f"{options.probes} probe trainings of {probes.samples} samples, total batches from {low} to {high}")
        profile = profile_convergence(
            probes,
            min_total=low,
            max_total=high,
            probes=options.probes,
            rng=np.random.default_rng(options.seed),
            on_profile=lambda so_far: so_far.save(part),
        )
    except (ProbeError, ValueError, KeyboardInterrupt) as error:
        kept = f"\nThe probes that ended are in {part}, which is a profile, too." if probes.count > 1 else ""
        hint = misplaced("profile-convergence", options)
        sys.stderr.write(f"lightning-hetero profile-convergence: {str(error) or 'interrupted'}{hint}{kept}\n")
        return 1
    profile.save(output)
    part.unlink()
    _say(f"wrote {output}: {len(profile.points)} probe trainings, {_range(profile)}")
    return 0


def ranges(
    script: ProbeReport | None, samples: int | None, min_total: int | None, max_total: int | None
) -> tuple[int, int, int]:
    """Return samples of a probe training, least and greatest total: as given, or by the script's report on itself.

    By default half of an epoch (StellaTrain, sec. 4.3), and totals from a quarter to four times the script's own.

    Args:
        script: the script's report, ``None`` if all three are given.
        samples: samples of a training; ``None`` for the default.
        min_total: least total batch; ``None`` for the default.
        max_total: greatest total batch; ``None`` for the default.

    Raises:
        ValueError: if the totals cannot run, or leave too few batches.

    Example:
        >>> script = ProbeReport(None, 0, 0, world_size=2, total=64, dataset=4000, min_local=1)
        >>> ranges(script, None, None, None), ranges(script, 1000, None, 100)
        ((2000, 16, 250), (1000, 16, 100))
    """
    low, high = min_total, max_total
    if script is not None:
        least = script.world_size * script.min_local
        samples = -(-script.dataset // 2) if samples is None else samples
        low = max(least, script.total // 4) if low is None else low
        high = min(4 * script.total, samples // MIN_STEPS) if high is None else high
        if low < least:
            raise ValueError(
                f"--min-total {low} cannot give each of {script.world_size} workers at least {script.min_local} "
                f"samples. Give {least} at least."
            )
    if samples is None or low is None or high is None:
        raise ValueError("without the script's answer all of --samples, --min-total and --max-total are needed.")
    steps = MIN_STEPS
    if high * steps > samples or high < low:
        raise ValueError(
            f"probe trainings of {samples} samples with total batches from {low} to {high} are too short: each needs "
            f"{steps} batches at least. Raise --samples to {steps * max(low, high)}, or lower --min-total and "
            "--max-total."
        )
    return samples, low, high


class ScriptProbes:
    """Probe trainings of a script, one at a time: ``(compression rate, total batch, staleness) -> smoothed loss``.

    Args:
        command: command that starts the script.
        samples: samples of a training.
        seed: seed of the samples' order, for scripts that do not set one.
        timeout: seconds after which a probe has failed.
        say: shows one line.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        samples: int = 0,
        seed: int = 0,
        timeout: float = 3600.0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.run, self.samples = ScriptRun(command, seed=seed, timeout=timeout), samples
        self.count, self._say = 0, say or _say

    def take(self, samples: int) -> None:
        """Set the number of samples for each training from now on."""
        self.samples = samples

    def describe(self) -> ProbeReport:
        """Ask the script for its report on itself, without training.

        Raises:
            ProbeError: if it does not answer.
        """
        return self._run(samples=0)

    def __call__(self, rate: float, total: int, staleness: int) -> float:
        """Return the smoothed loss of one probe training, NaN if it diverged.

        Raises:
            ProbeError: if the script fails, or does not answer.
        """
        begin = time.monotonic()
        report = self._run(samples=self.samples, total=total, rate=rate, staleness=staleness)
        stale = ", gradients a step late" if report.staleness else ""
        if staleness > report.staleness:
            stale = ", no gradient stale, which the script's settings do not allow"
        what = "baseline" if self.count == 0 else f"probe {self.count}"
        loss = math.nan if report.loss is None else report.loss
        self._say(f"{what}: rate {rate:.3f}, total {total}{stale}: loss {loss:.4g} ({time.monotonic() - begin:.0f} s)")
        self.count += 1
        return loss

    def _run(self, *, samples: int, total: int | None = None, rate: float = 0.0, staleness: int = 0) -> ProbeReport:
        what = (
            f"the probe training with compression rate {rate:.3f}, total batch {total or 'of the script'}, "
            f"staleness={staleness} and {samples} samples"
        )

        def order(answer: str) -> ProbeOrder:
            return ProbeOrder(answer, samples, total, rate, staleness)

        return self.run.ask(order, ProbeReport.read, what, "raise --timeout, or lower --samples")


def _range(profile: ConvergenceProfile) -> str:
    extra = [y for *_, y in profile.points]
    return f"extra loss from {min(extra):.1%} to {max(extra):.1%}"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()

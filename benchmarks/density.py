"""Useful samples per second of the controller of the density, against every fixed density, on links whose rate moves.

Two emulated workers, one of 0.6 of the speed of the other, exchange block top-k messages on a virtual clock, with 10 %
of jitter on each message and 5 % on computing, over a link of two milliseconds. Each sample is worth ``1 / (1 + g)``,
with ``g`` so much for each factor of ten in density: 0.1, as the controller assumes, or, to see what that assumption
costs, 0.03 or 0.3. The best of all fixed densities is chosen in hindsight. ``auto`` is the density that
``compression="auto"`` finds at the first rate of the trace, without the dense steps that it takes to find it. Messages
are synchronous in all trainings of a row, or all stale, so that what staleness costs in samples cancels out.

``at_once`` is a controller that holds a sync round after every step, for nothing: none can react to a link that falls
before the first slow message has arrived. Its estimate of a rate that rises is as slow by the second as the
controller's, whose rounds are about a second apart.

The weights of the controller's estimate of the link were chosen on the first twelve links. ``held_out`` links had no
part in that, and their jitter has another seed.

    python benchmarks/density.py                       # 17 minutes
    python benchmarks/density.py --only outages sine   # some traces
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
from hardware import write_table

from lightning_hetero import BlockTopK
from lightning_hetero.core import TimeToAccuracyPlanner
from lightning_hetero.core.compression.auto import Computing, LinkMeasurement, choose_density
from lightning_hetero.core.link import message_times
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, LinkProfile

HERE = Path(__file__).parent
MBIT, SECONDS, EARLY, LATENCY, TOTAL = 125e3, 120.0, 30.0, 2e-3, 64
GRID = np.geomspace(0.001, 0.3, 14).round(5).tolist()
PER_DECADE = (0.1, 0.03, 0.3)
MODELS = {"communication-bound": (160e6, 0.1), "in between": (80e6, 0.25), "compute-bound": (20e6, 0.4)}
"""Bytes of the gradient, and seconds of computing."""


def walked(moves, first, least):
    """A rate of a random walk in its logarithm, to 1000 Mbit/s."""
    walk = [first]
    for move in moves:
        walk.append(float(np.clip(walk[-1] * np.exp(move), least, 1000.0)))
    return walk


def traces():
    """Rates in Mbit/s of each second, by name; of a tenth of one for outages and spikes."""
    rng, t, fine = np.random.default_rng(1), np.arange(SECONDS), np.arange(0.0, SECONDS, 0.1)
    walk = walked(rng.normal(0.0, 0.25, len(t) - 1), 100.0, 10.0)
    wan = np.exp(rng.uniform(*np.log([50.0, 600.0]), int(SECONDS / 4)))
    found = {f"steady {rate}": (t[:1], [float(rate)]) for rate in (10, 100, 1000)}
    found["falling"] = t, 1000.0 * 0.01 ** (t / SECONDS)
    found["rising"] = t, 10.0 * 100.0 ** (t / SECONDS)
    for period in (8, 60):
        found[f"steps of {period // 2} s"] = t, np.where(t % period < period / 2, 500.0, 20.0)
    found["sine"] = t, 100.0 * 5.0 ** np.sin(2 * np.pi * t / 40)
    found["outages"] = fine, np.where(fine % 15 < 13, 100.0, 1.0)
    found["spikes"] = fine, np.where(fine % 5 < 4.75, 100.0, 2.0)
    found["random walk"] = t, walk
    found["wan.py"] = t, np.repeat(wan, 4)
    return {name: [(float(s), MBIT * float(r)) for s, r in zip(*pair, strict=True)] for name, pair in found.items()}


def held_out():
    """Eight more, that nothing was chosen by."""
    rng, t, fine = np.random.default_rng(77), np.arange(SECONDS), np.arange(0.0, SECONDS, 0.1)
    walk = walked(rng.normal(0.0, 0.2, len(t) - 1), 200.0, 5.0)
    wan = np.exp(rng.uniform(*np.log([20.0, 300.0]), int(SECONDS / 6)))
    found = {
        "steady 30": (t[:1], [30.0]),
        "one fall": (t, np.where(t < 50, 400.0, 20.0)),
        "steps of 2 s": (t, np.where(t % 4 < 2, 300.0, 30.0)),
        "steps of 15 s": (t, np.where(t % 30 < 15, 300.0, 15.0)),
        "sine of 25 s": (t, 60.0 * 4.0 ** np.sin(2 * np.pi * t / 25 + 1)),
        "outages of 3 s": (fine, np.where((fine + 7) % 20 < 17, 200.0, 4.0)),
        "another walk": (t, walk),
        "6 s each": (t, np.repeat(wan, 6)),
    }
    return {name: [(float(s), MBIT * float(r)) for s, r in zip(*pair, strict=True)] for name, pair in found.items()}


def simulated(model, trace, policy, density, stale, seed, **rounds):
    """Seconds at which each step ended, and its density."""
    size, computing = MODELS[model]
    profiles = [
        DeviceProfile(0.0, 0.1 * computing, f * computing / TOTAL, 0.1 * computing, jitter=0.05) for f in (1.28, 2.13)
    ]
    link = LinkProfile(gradient_bytes=size, rate=trace[0][1], latency=LATENCY, jitter=0.1, trace=trace)
    simulator = ClusterSimulator(
        profiles, TOTAL, link=link, policy=policy, seed=seed, staleness=int(stale),
        compression=BlockTopK(density=density, warmup_steps=0), **rounds,
    )  # fmt: skip
    while simulator.clock < SECONDS:
        simulator.advance(8)
    return simulator.result.clock, simulator.result.densities


def useful(run, until, per_decade):
    """Samples per second up to a second, each worth less at a low density; of the step then, what has run of it."""
    ends, densities = run
    begins = np.array([0.0, *ends[:-1]])
    share = np.clip((until - begins) / (ends - begins), 0.0, 1.0)
    return float((share * TOTAL / (1.0 + per_decade * np.log10(1.0 / densities))).sum() / until)


def at_once(model, trace, stale, seed):
    """The same of a controller whose rounds follow every step."""
    usual = message_times.FASTER
    message_times.FASTER = usual * min(MODELS[model][1], 1.0)
    try:
        return simulated(model, trace, TimeToAccuracyPlanner(), 0.1, stale, seed, replan=1, round_seconds=0.0)
    finally:
        message_times.FASTER = usual


def chosen_once(model, trace, stale):
    """Density of ``compression="auto"``; 1 for dense sums."""
    size, computing = MODELS[model]
    measured = LinkMeasurement(LATENCY, trace[0][1], 0.0, world_size=2, numel=int(size / 4))
    found = choose_density(measured, (0.001, 0.003, 0.01, 0.03, 0.1), computing=Computing(computing), stale=stale)
    return found.density or 1.0


def rows_of(model, name, trace, stale, seeds):
    """One row for each horizon and truth."""
    fixed = {d: [simulated(model, trace, "perf_model", d, stale, seed) for seed in seeds] for d in GRID}
    once = chosen_once(model, trace, stale)
    others = {
        "auto": [simulated(model, trace, "perf_model", once, stale, seed) for seed in seeds],
        "controller": [simulated(model, trace, TimeToAccuracyPlanner(), 0.1, stale, seed) for seed in seeds],
        "at_once": [at_once(model, trace, stale, seed) for seed in seeds],
    }
    for until, per_decade in [
        (SECONDS, PER_DECADE[0]),
        (EARLY, PER_DECADE[0]),
        *((SECONDS, p) for p in PER_DECADE[1:]),
    ]:
        worth = {d: np.mean([useful(run, until, per_decade) for run in runs]) for d, runs in fixed.items()}
        best = max(worth, key=worth.get)
        row = {"model": model, "trace": name, "stale": stale, "seconds": until, "per_decade": per_decade}
        row |= {"best_fixed": best, "samples_per_s": worth[best]}
        for kind, runs in others.items():
            row[f"{kind}_ratio"] = float(np.mean([useful(run, until, per_decade) for run in runs]) / worth[best])
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of traces")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", default=str(HERE / "results" / "density.json"))
    args = parser.parse_args()
    rows = []
    for kept, links, first in ((False, traces(), 0), (True, held_out(), 5)):
        links = {name: trace for name, trace in links.items() if not args.only or name in args.only}
        for stale, model, (name, trace) in itertools.product((False, True), MODELS, links.items()):
            found = rows_of(model, name, trace, stale, range(first, first + args.seeds))
            rows += [{**row, "held_out": kept} for row in found]
    write_table(rows, args.json, "controller of the density and one density, on a virtual clock")


if __name__ == "__main__":
    main()

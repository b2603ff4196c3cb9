"""Milliseconds that all ranks wait for one decision on density, total and split, by the number of tensors: 50 at most.

The total moves. The parameters are laid out as a run lays them out; medians of seven decisions, in processor time.

    python benchmarks/decide.py
"""

import argparse
import time
from pathlib import Path

import numpy as np
from hardware import write_table

from lightning_hetero import BatchPlan
from lightning_hetero.compression import Layout
from lightning_hetero.compression.wire_format import message_size
from lightning_hetero.core import PlanContext, RunningNoiseScale, StepObservations, TimeToAccuracyPlanner
from lightning_hetero.core.link.message_link import MessageLink

HERE = Path(__file__).parent
TENSORS, ELEMENTS = (161, 300, 3000), 25_600_000  # the tensors of a ResNet-50 and more, and its elements


def milliseconds(tensors):
    """Median over decisions on a model of so many tensors."""
    layout = Layout.of([(f"layer.{i}.weight", ELEMENTS // tensors) for i in range(tensors)], block=16)
    sizes = np.array([[20.0, 20.0], [30.0, 10.0]] * 16)
    zeros, taken = np.zeros_like(sizes), []
    seen = StepObservations(sizes, zeros, 0.05 + sizes * [0.001, 0.003], zeros, zeros, zeros + 0.4, zeros)
    noise = RunningNoiseScale().update(trace=400.0, global_sq_norm=11.0, total_batch_size=40, steps=50)
    size = message_size(layout.num_blocks, layout.block, "bfloat16", 2)
    link = MessageLink(0.1, size, (1e5, 1e5), seconds=0.4)
    context = PlanContext(40, ("a", "b"), (1, 1), link=link, noise=noise)
    planner = TimeToAccuracyPlanner(initial_total=40, max_total_batch_size=1000, moves_batch=True)
    for _ in range(7):
        begin = time.process_time()
        decision = planner.decide(seen, BatchPlan(40, (30, 10)), context)
        taken.append(1e3 * (time.process_time() - begin))
    assert decision.proposal is not None
    return float(np.median(taken)), decision.proposal.plan.total_batch_size


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(HERE / "results" / "decide.json"))
    rows = []
    for tensors in TENSORS:
        taken, total = milliseconds(tensors)
        rows.append(
            {"tensors": tensors, "elements": ELEMENTS, "milliseconds": taken, "total_from": 40, "total_to": total}
        )
    write_table(rows, parser.parse_args().out, "one decision on density, total and split")


if __name__ == "__main__":
    main()

"""Seconds that all ranks wait for one decision on density and split, by the number of parameters: at most 50 ms."""

import sys
import time

import numpy as np

from lightning_hetero.compression.wire_format import message_size
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.link.bandwidth import LinkEstimate
from lightning_hetero.core.link.message_link import MessageLink
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.time_to_accuracy import TimeToAccuracyPlanner


def main() -> None:
    sizes = np.array([[20.0, 20.0], [30.0, 10.0]] * 16)
    zeros = np.zeros_like(sizes)
    seen = StepObservations(sizes, zeros, 0.05 + sizes * [0.001, 0.003], zeros, zeros, zeros + 0.4, zeros)
    for elements in (1_000_000, 100_000_000):
        link = MessageLink(
            0.1, message_size(elements // 16, 16, "bfloat16", 2), (LinkEstimate(1e5),) * 2, seconds=0.4, step=40_000
        )
        context, taken = PlanContext(40, ("a", "b"), (1, 1), link=link), []
        for _ in range(7):
            begin = time.process_time()
            TimeToAccuracyPlanner(initial_total=40).decide(seen, BatchPlan(40, (30, 10)), context)
            taken.append(time.process_time() - begin)
        sys.stdout.write(f"{elements:>11} elements: {1e3 * np.median(taken):6.1f} ms a decision\n")


if __name__ == "__main__":
    main()

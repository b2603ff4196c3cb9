"""What leaving out, adding or not bounding a worker gives, against all integer splits."""

from itertools import product

import numpy as np
import pytest

from lightning_hetero.core.report.analysis import RunFigures
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.report.what_if import what_if
from tests.recorded import a_round, header


def best(nodes, total, link, bounds=None):
    bounds = bounds or [total] * len(nodes)
    times = [
        max((q + k) * b + s + m for (q, s, k, m), b in zip(nodes, sizes, strict=True)) + link
        for sizes in product(*[range(1, min(total, most) + 1) for most in bounds])
        if sum(sizes) == total
    ]
    return min(times)


@pytest.mark.parametrize("seed", range(12))
def test_every_change_is_the_best_of_all_splits(seed):
    generator = np.random.default_rng(seed)
    workers, link = 2 + seed % 2, 0.003
    nodes = [tuple(row) for row in generator.uniform(0.1, 1.0, (workers, 4)) * [0.002, 0.02, 0.004, 0.02]]
    total = 4 * workers
    bounds = [int(generator.integers(4, 7)) for _ in range(workers)] if seed % 3 == 0 else None
    more = {"max_local": tuple(bounds)} if bounds else {}
    sizes = (4,) * workers
    figures = RunFigures(RunRecord.of([header(workers), a_round(generator, sizes, nodes=nodes, link=link, **more)]))
    now = best(nodes, total, link, bounds)
    found = {(one.change, one.rank): one for one in what_if(figures)}
    for rank in range(workers):
        rest = [i for i in range(workers) if i != rank]
        expected = {
            ("one more like", rank): ([*range(workers), rank], None),
            ("without", rank): (rest, None),
        }
        for key, (order, _) in expected.items():
            most = None if bounds is None else [bounds[i] for i in order]
            if most is not None and sum(most) < total:
                assert key not in found
                continue
            time = best([nodes[i] for i in order], total, link, most)
            assert found[key].step_time == pytest.approx(time)
            assert found[key].gain == pytest.approx(now / time - 1)
        if bounds and sizes[rank] >= bounds[rank]:
            free = [total if i == rank else bounds[i] for i in range(workers)]
            assert found[("no bound on", rank)].step_time == pytest.approx(best(nodes, total, link, free))
        else:
            assert ("no bound on", rank) not in found


def test_one_worker_cannot_be_left_out():
    record = a_round(np.random.default_rng(0), (8,), nodes=[(0.001, 0, 0.001, 0)])
    found = what_if(RunFigures(RunRecord.of([header(1), record])))
    assert [one.change for one in found] == ["one more like"]


def test_without_a_model_there_is_no_answer():
    record = a_round(np.random.default_rng(0), (8, 8), nodes=[(0.001, 0, 0.001, 0)] * 2)
    assert what_if(RunFigures(RunRecord.of([header(2)]))) == ()
    from dataclasses import replace

    assert what_if(RunFigures(RunRecord.of([header(2), replace(record, nodes=())]))) == ()

"""Each advice stands where its figure says so, and nowhere else."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.report.advice import advice
from lightning_hetero.core.report.analysis import RunFigures
from lightning_hetero.core.report.run_record import RunRecord
from tests.recorded import a_round, header

NODES = [(0.001, 0.002, 0.002, 0.001), (0.002, 0.002, 0.004, 0.001)]


def given(sizes=(21, 11), nodes=NODES, policy="perf_model", change=None, **more):
    record = a_round(np.random.default_rng(0), sizes, nodes=nodes, **more)
    return advice(RunFigures(RunRecord.of([header(len(sizes), policy), replace(record, **(change or {}))])))


def test_a_balanced_run_needs_no_advice():
    assert given() == ()
    assert advice(RunFigures(RunRecord.of([header(2)]))) == ()


def test_a_link_that_makes_steps_wait():
    (text,) = given(link=0.1)
    assert text.startswith("communication-bound: 59% of the step waits for the link")
    assert text.endswith("2.4x at most")
    assert given(link=0.1, change={"density": 0.01}) == ()


def test_a_loader_that_makes_its_worker_wait():
    texts = given(data=(0.0, 0.05))
    assert any(text.startswith("rank 1 waits 4") and "num_workers" in text for text in texts)
    assert not any("rank 0 waits" in text for text in texts)


def test_a_worker_that_only_costs_time():
    slow = [*NODES, (0.0, 0.2, 0.0, 0.1)]
    texts = given((29, 18, 1), nodes=slow)
    assert any(text.startswith("rank 2 makes the job slower: without it") for text in texts)
    assert not any("without it" in text for text in given())


def test_a_bound_by_memory():
    texts = given((16, 16), change={"max_local": (16, 100)})
    assert any(text.startswith("rank 0 is at its most samples (memory)") for text in texts)


def test_a_policy_that_keeps_the_split():
    texts = given((16, 16), policy="even")
    record = a_round(np.random.default_rng(0), (16, 16), nodes=NODES)
    figures = RunFigures(RunRecord.of([header(2), record]))
    gain = 1 / figures.share_of_optimum - 1
    assert gain == pytest.approx(figures.step_time / figures.optimum - 1), "measured as the model says"
    assert f"the even policy keeps the split: the optimum of the time model is {gain:.0%} faster" in texts
    assert 0.1 < gain < 0.9
    for policy in ("fixed", "static"):
        assert any(text.startswith(f"the {policy} policy keeps the split") for text in given((16, 16), policy=policy))
        assert not any("keeps the split" in text for text in given(policy=policy)), "the optimum"
    assert not any("keeps the split" in text for text in given((16, 16)))


def test_the_workers_that_cost_most_come_first_and_no_more_than_three():
    slow = [(0.0, fixed, 0.0, 0.1) for fixed in (0.2, 0.4, 0.2, 0.2, 0.2)]
    texts = [text for text in given((20, 20, 1, 1, 1, 1, 1), nodes=[*NODES, *slow]) if "without it" in text]
    assert texts[0].startswith("rank 3 makes the job slower")
    bounds = [(0.001, 0.002, 0.002, 0.001)] * 2 + [(0.004, 0.002, 0.008, 0.001)] * 2
    texts = given((4, 6, 16, 16), nodes=bounds, change={"max_local": (4, 6, 100, 100)})
    gains = [int(text.split(" faster")[0].split()[-1].rstrip("%")) for text in texts if "at its most samples" in text]
    assert len(gains) == 2
    assert gains == sorted(gains, reverse=True)
    many = given((4, 4, 4, 4, 16, 16), nodes=[bounds[0]] * 4 + bounds[2:], change={"max_local": (4,) * 4 + (100,) * 2})
    assert len(many) == 3


def test_short_steps():
    short = [(1e-5, 1e-3, 1e-5, 1e-4), (1e-5, 4e-3, 1e-5, 1e-4)]
    texts = given(nodes=short, link=1e-4)
    assert 'steps of 4.42 ms are too short to balance: a larger batch, or strategy="hetero_elastic"' in texts
    assert not any("too short" in text for text in given((16, 16), nodes=[short[0]] * 2, link=0.0)), "nobody waits"


def test_the_newest_round_says_whether_the_link_is_compressed():
    one = a_round(np.random.default_rng(0), (21, 11), nodes=NODES, link=0.1)
    later = replace(one, density=0.01)
    found = [advice(RunFigures(RunRecord.of([header(2), *rounds]))) for rounds in ((one, later), (later, one))]
    assert [any("communication" in text for text in texts) for texts in found] == [False, True]


def test_a_link_that_takes_all_of_the_step():
    assert any(text.endswith("20.0x at most") for text in given(link=100.0))


def test_a_share_of_the_optimum_of_nothing_gives_a_finite_gain():
    texts = given((31, 1), policy="even", change={"step_time": 0.001})
    assert any(text.endswith("is 9900% faster") for text in texts)

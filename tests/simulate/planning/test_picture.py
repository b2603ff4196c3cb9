"""Picture of a plan: what its bars show."""

import pytest

from lightning_hetero.simulate.planning import Cluster, Link, Worker, picture, plan_cluster

FAST, SLOW = Worker("fast", 0.001, 0.01, 0.002, 0), Worker("slow", 0.003, 0.01, 0.006, 0)


def test_a_bar_is_the_step_of_a_kind_of_workers(monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(picture, "_save", lambda figure, path: figures.append(figure))
    answer = plan_cluster(Cluster((FAST, FAST, SLOW), Link(4e7, 1e9)), 60)
    picture.draw_plan(answer, "plan.png", "lab")
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["2 x fast", "slow"]
    compute, idle = ([bar.get_width() for bar in bars] for bars in axes.containers)
    assert compute == pytest.approx([1e3 * answer.workers[i].compute_time for i in (0, 2)])
    assert [a + b for a, b in zip(compute, idle, strict=True)] == pytest.approx([1e3 * answer.step_time] * 2)
    assert [bar.get_x() for bar in axes.containers[1]] == pytest.approx(compute)

"""Global batches divided by a division: the same samples for all ranks together, by the division's cut for each."""

from typing import ClassVar

import pytest

from lightning_hetero.core import BatchPlan, PlanEntry, PlanHistory
from lightning_hetero.data import PermutationStream, UnevenBatchSampler
from lightning_hetero.data.division import Parts


class FromBothEnds:
    """Rank 0 takes the smallest indices, and one more than the plan says, the last rank the others."""

    features: ClassVar[int] = 2

    def divide(self, samples, sizes, plan):
        ordered, more = sorted(samples), min(sizes[0] + 1, len(samples) - 1)
        indices = (ordered[:more], ordered[more:])
        return Parts(indices, tuple((float(len(own)), float(sum(own))) for own in indices))

    def fingerprint(self):
        return 0


def samplers(history, n, division=None, **kwargs):
    stream = PermutationStream(n, shuffle=True, seed=3)
    return [UnevenBatchSampler(stream, lambda: history[0], rank, division=division, **kwargs) for rank in range(2)]


def test_the_global_batches_stay_and_the_division_cuts_them():
    history = [PlanHistory((PlanEntry(0, 0, BatchPlan(8, (4, 4))), PlanEntry(0, 2, BatchPlan(8, (6, 2)))))]
    plain = [list(part) for part in samplers(history, 30)]
    parts = samplers(history, 30, FromBothEnds())
    divided = [list(part) for part in parts]
    for step, (first, second) in enumerate(zip(*divided, strict=True)):
        assert {*first, *second} == {*plain[0][step], *plain[1][step]}
        assert max(first) < min(second)
        share = parts[1].step_at(0, step)
        assert share.sizes == (len(first), len(second))
        assert share.work == (float(len(second)), float(sum(second)))
        assert share.planned == len(plain[1][step])
        assert share.regular is (step < 3)
    assert [len(batch) for batch in divided[0]] == [5, 5, 7, 5]


def test_a_step_that_was_drawn_before_a_change_of_plan_keeps_its_shares():
    history = [PlanHistory((PlanEntry(0, 0, BatchPlan(8, (4, 4))),))]
    part, _ = samplers(history, 32, FromBothEnds())
    drawn = iter(part)
    assert [len(next(drawn)) for _ in range(2)] == [5, 5]
    history[0] = history[0].extended(PlanEntry(0, 2, BatchPlan(8, (6, 2))))
    assert [len(batch) for batch in drawn] == [7, 7]
    assert [part.sizes_at(0, step) for step in range(4)] == [(5, 3), (5, 3), (7, 1), (7, 1)]


@pytest.mark.parametrize("step", [0, 2])
def test_a_step_that_was_not_drawn_here_has_the_same_share(step):
    history = [PlanHistory((PlanEntry(0, 0, BatchPlan(8, (4, 4))),))]
    part, _ = samplers(history, 30, FromBothEnds())
    assert not part.step_at(0, step).regular, "there is no order yet, so the sizes are those of the plan"
    list(part)
    resumed, _ = samplers(history, 30, FromBothEnds(), start=(0, 3))
    list(resumed)
    assert resumed.step_at(0, step) == part.step_at(0, step)


def test_a_rank_without_a_share_runs_the_smallest_batch():
    class All:
        features = 1

        def divide(self, samples, sizes, plan):
            return Parts((list(samples), []), ((8.0,), (0.0,)))

    history = [PlanHistory((PlanEntry(0, 0, BatchPlan(8, (8, 0))),))]
    first, second = samplers(history, 8, All(), min_local=2)
    assert [len(batch) for batch in second] == [2]
    assert sorted(next(iter(first))) == list(range(8))

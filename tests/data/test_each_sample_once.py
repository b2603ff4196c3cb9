"""Every kind of data: each sample once an epoch and the gradients of one process, also after a plan or a resume."""

from functools import partial

import numpy as np
import pytest

from tests.data.kinds import CHANGED, KINDS, SPLITS, trained_on
from tests.helpers import raised
from tests.loops import one_process
from tests.ranks import run_ranks
from tests.streams import SAMPLES, taken

EVERYTHING = list(range(SAMPLES))
pytestmark = pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")


def _runs(rank, name, folder):
    """A run that saves behind each step, one with a plan, and those that go on inside an epoch, at its end, later."""
    found = {"whole": trained_on(rank, 2, name, folder=folder)}
    found["planned"] = trained_on(rank, 2, name, plans={(0, 1): CHANGED}) if KINDS[name].sizes else found["whole"]
    steps = sum(epoch == 0 for epoch, *_ in found["whole"]["seen"])
    found["places"] = {"inside": 3, "last": steps, "later": steps + 2}
    found["paths"] = {place: f"{folder}/{step}.ckpt" for place, step in found["places"].items()}
    found["rests"] = {place: trained_on(rank, 2, name, resume=path) for place, path in found["paths"].items()}
    return found


@pytest.fixture(scope="module", params=KINDS)
def runs(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("runs"))
    return request.param, run_ranks(_runs, 2, request.param, folder)


def of(results, run):
    return [result[run] for result in results]


def before(results, step):
    return [{"seen": whole["seen"][:step]} for whole in of(results, "whole")]


def share_of_first(results, weight, epoch, steps):
    """Part of the first rank in what all have taken of these steps."""
    parts = [sum(weight(i) for e, s, own in r["seen"] if e == epoch and s in steps for i in own) for r in results]
    return parts[0] / sum(parts)


@pytest.mark.parametrize("run", ["whole", "planned"])
def test_each_sample_is_taken_once_an_epoch_in_the_same_steps_of_all_ranks(runs, run):
    seen = of(runs[1], run)
    assert taken(seen, 0) == taken(seen, 1) == EVERYTHING
    assert len({tuple(entry[:2] for entry in r["seen"]) for r in seen}) == 1
    assert [r["steps"] for r in seen] == [len(seen[0]["seen"])] * 2


def test_gradients_and_weights_are_those_of_one_process(runs):
    planned = of(runs[1], "planned")
    expected = one_process(planned)
    for result in planned:
        np.testing.assert_allclose(result["grads"], expected["grads"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(result["weights"], expected["weights"], rtol=0, atol=1e-12)


def test_a_plan_divides_the_next_batches_and_never_those_before(runs):
    name, results = runs
    planned, kind = of(results, "planned"), KINDS[name]
    if not kind.sizes:
        assert planned[0]["history"] == []
        return
    history = planned[0]["history"]  # weights of costs are learned in further plans
    assert history[0] == (0, 0, SPLITS[2])
    assert next(2 <= step <= 10 for epoch, step, sizes in history if epoch == 0 and sizes == CHANGED)
    assert [r["seen"][:2] for r in planned] == [r["seen"][:2] for r in of(results, "whole")] or not kind.replayed
    assert share_of_first(planned, kind.weight, 0, range(2)) == pytest.approx(5 / 8, abs=0.14)
    assert share_of_first(planned, kind.weight, 1, range(4)) == pytest.approx(2 / 8, abs=0.14)


def test_a_run_that_goes_on_takes_the_rest_once(runs):
    name, results = runs
    for place, step in results[0]["places"].items():
        rests = [result["rests"][place] for result in results]
        for epoch in range(2):
            assert sorted(taken(before(results, step), epoch) + taken(rests, epoch)) == EVERYTHING, place
        if KINDS[name].replayed:
            for whole, rest in zip(of(results, "whole"), rests, strict=True):
                assert rest["seen"] == whole["seen"][step:], place
                np.testing.assert_array_equal(rest["weights"], whole["weights"])


def _goes_on(rank, ranks, name, path):
    return trained_on(rank, ranks, name, resume=path)


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_goes_on_behind_what_was_taken(runs, ranks):
    name, results = runs
    if ranks not in KINDS[name].others:
        pytest.skip("each rank's data are its own")
    place = "inside" if ranks == 3 else "later"
    step, path = results[0]["places"][place], results[0]["paths"][place]
    rests = run_ranks(_goes_on, ranks, ranks, name, path)
    for epoch in range(2):
        assert sorted(taken(before(results, step), epoch) + taken(rests, epoch)) == EVERYTHING
    if KINDS[name].same:
        np.testing.assert_allclose(rests[0]["weights"], results[0]["whole"]["weights"], rtol=1e-9, atol=1e-12)


def _refused(rank, name, path):
    return raised(partial(trained_on, rank, 3, name, resume=path))


def test_streams_of_each_rank_do_not_go_on_inside_an_epoch_with_others(runs):
    name, results = runs
    if "stream" not in name or KINDS[name].others:
        pytest.skip("goes on with any number of ranks")
    errors = run_ranks(_refused, 3, name, results[0]["paths"]["inside"])
    assert all("shard='mine'" in text for text in errors)

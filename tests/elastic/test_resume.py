"""A state of elastic averaging taken up: by the same ranks, by others, with another merge rule."""

from lightning_hetero.elastic.config import ElasticConfig
from lightning_hetero.elastic.resume import ResumePoint

STATE = {"position": [2, 64], "batch_sizes": [8, 4], "previous": {"w": 1.0}, "replicas": [{"w": 2.0}, {"w": 3.0}]}


def point(merge="adaptive", rank=1, world_size=2):
    return ResumePoint.of(STATE, ElasticConfig(merge), rank=rank, world_size=world_size)


def test_the_same_ranks_go_on_with_all_of_it():
    assert point() == ResumePoint((2, 64), None, {"previous": {"w": 1.0}, "own": {"w": 3.0}}, (8, 4))
    assert point(rank=0).replica["own"] == {"w": 2.0}


def test_another_number_of_ranks_begins_with_equal_batches_and_the_global_model():
    found = point(world_size=3)
    assert (found.position, found.batch_sizes) == ((2, 64), ())
    assert found.replica == {"previous": {"w": 1.0}, "own": {}}


def test_a_rule_that_keeps_batches_equal_takes_no_sizes():
    assert point("mean").batch_sizes == ()
    assert point("mean").replica == point().replica

"""The schema of a run's record is what its readers rely on: names, kinds, and what is left out."""

from dataclasses import fields, is_dataclass

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.report import records


def test_every_kind_has_its_name():
    kinds = [vars(records)[name].kind for name in records.__all__ if hasattr(vars(records)[name], "kind")]
    assert sorted(kinds) == ["change", "end", "gain", "round", "run", "straggler"]


def test_every_field_is_explained():
    for name in records.__all__:
        cls = vars(records)[name]
        if is_dataclass(cls):
            missing = [one.name for one in fields(cls) if f"        {one.name}: " not in cls.__doc__]
            assert not missing, (name, missing)


def test_a_sampled_step_has_the_fields_of_an_observation():
    renamed = {"local_batch_sizes": "size", "data_wait": "data"}
    assert tuple(renamed.get(name, name) for name in StepObservations.FIELDS) == records.RoundRecord.SAMPLED


def test_the_total_of_a_round_is_that_of_all_workers():
    assert records.RoundRecord(0.0, 0, 0, 1, 0, (3, 4)).total == 7

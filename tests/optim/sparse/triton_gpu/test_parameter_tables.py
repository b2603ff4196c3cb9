"""Tables that are uploaded while steps go on: what is being copied is not written to, and nothing waits needlessly."""

import numpy as np
import torch

from lightning_hetero.optim.sparse.triton_gpu.parameter_tables import (
    STAGED_COPIES,
    UNIT,
    ParameterTables,
    PinnedUpload,
    chunk_rows,
)


class Event:
    """Stands for ``torch.cuda.Event``: knows behind which upload it was recorded last."""

    uploads, waited = 0, []

    def __init__(self):
        self.behind = None

    def record(self):
        self.behind = Event.uploads

    def synchronize(self):
        Event.waited.append(self.behind)


def test_the_host_waits_for_the_copy_of_some_steps_ago_only(monkeypatch):
    zeros, pinned = torch.zeros, []
    monkeypatch.setattr(Event, "waited", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch, "zeros", lambda shape, *, pin_memory=None, dtype, device=None: pinned.append(pin_memory) or zeros(shape)
    )
    upload = PinnedUpload((3,), torch.int64, torch.device("cuda"))
    assert pinned == [None, *[True] * STAGED_COPIES], "copies from other memory would be waited for"
    for number in range(3 * STAGED_COPIES):
        monkeypatch.setattr(Event, "uploads", number)
        assert upload(np.full(3, number)).tolist() == [number] * 3
    assert Event.waited == [*[None] * STAGED_COPIES, *range(2 * STAGED_COPIES)]


def test_16_bytes_are_read_at_once_only_where_all_that_is_read_begins_so():
    """Else a GPU reads nothing: parameter, gradient and both buffers, in any order."""

    def table(odd, numel=64):
        tensors = [torch.zeros(numel + 1)[1 if place == odd else 0 :][:numel] for place in range(6)]
        assert tensors[0].data_ptr() % 16 == (4 if odd == 0 else 0)
        return ParameterTables(torch.device("cpu"), 2).of([tensors], 16)[1]

    assert [[unit for _, unit in table(odd)] for odd in range(6)] == [*[[1]] * 4, *[[UNIT]] * 2]
    assert [unit for _, unit in table(None, numel=67)] == [UNIT, 1], "whole chunks, and the rest"


def test_tables_are_made_anew_where_sizes_or_addresses_change():
    tables = ParameterTables(torch.device("cpu"), 2)
    for sizes in ((64, 32), (32, 64), (32, 64)):
        tensors = [[torch.zeros(numel) for _ in range(6)] for numel in sizes]
        addresses, ((chunks, unit),) = tables.of(tensors, 16)
        assert addresses.tolist() == [[t.data_ptr() for t in row] for row in tensors]
        assert [sum(chunks[chunks[:, 0] == i, 3].tolist()) * unit for i in (0, 1)] == [*sizes]


def test_a_chunk_that_begins_between_two_units_goes_by_elements():
    assert chunk_rows([(20, True)], block=4, size=3).tolist() == [[0, 0, 3, 12, 0], [0, 3, 2, 8, 0]]

"""Tables that are uploaded while steps go on: what is being copied is not written to, and nothing waits needlessly."""

import numpy as np
import torch

from lightning_hetero.optim.owners import TURNS, Upload


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
    upload = Upload((3,), torch.int64, torch.device("cuda"))
    assert pinned == [None, *[True] * TURNS], "copies from other memory would be waited for"
    for number in range(3 * TURNS):
        monkeypatch.setattr(Event, "uploads", number)
        assert upload(np.full(3, number)).tolist() == [number] * 3
    assert Event.waited == [*[None] * TURNS, *range(2 * TURNS)]

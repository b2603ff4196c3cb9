"""The path on a device leaves every decision to it: the host never waits in a step, and reports a step later."""

import pytest
import torch

from lightning_hetero import BlockTopK
from lightning_hetero.comm.compressors.block_topk.gpu_path import DevicePath
from lightning_hetero.comm.compressors.block_topk.host_path import HostPath
from lightning_hetero.comm.compressors.block_topk.in_flight import BackwardPass, InFlight
from lightning_hetero.compression.encoder_protocol import Outcome
from lightning_hetero.compression.selectors import SelectorState
from tests.comm.compressors.block_topk.paths import BLOCK, SIZES, Arrival, Averager, model_blocks, place


class Device:
    """Notes what a device is told; `tests/comm/compressors/interpreted.py` runs the kernels themselves."""

    deferred = True

    def __init__(self, layout, form):
        self.layout, self.form, self.state = layout, form, SelectorState()
        self.residual = torch.arange(float(layout.num_blocks * BLOCK))
        self.touched = torch.zeros(layout.num_blocks, dtype=torch.bool)
        self.verdict, self.told, self.known = torch.tensor(0), [], None

    def receive(self, rows, *, rank, step):
        self.told.append(("receive", rows, rank, step))

    def deliver_bucket(self, slots, flat, weight, *, scale, fill):
        self.told.append(("deliver", [slot.name for slot in slots], weight, scale, fill))

    def outcome(self):
        known, self.known = self.known, None
        return known


def device_path(rank=0, clusters=((0,), (1,)), **given):
    model, parameters = model_blocks()
    topology = place(rank, clusters)
    form = model.message_format(BlockTopK(density=0.5, block=BLOCK), 0.5, topology.size)
    rows = torch.zeros(topology.size, form.num_bytes, dtype=torch.uint8)
    return DevicePath(Device(model.layout, form), model, topology, rows, **given), parameters


def two_buckets(path, **given):
    running = BackwardPass(**given)
    first, *others = path.model.layout.slots
    for slots in ([first], others):
        running.add(torch.zeros(sum(slot.numel for slot in slots)), slots, torch.futures.Future(), None)
    return running


@pytest.mark.parametrize("grad_scale", [None, lambda: 2.0])
def test_the_device_gets_all_messages_then_each_bucket(grad_scale):
    path, _ = device_path(rank=1)
    running, averager = two_buckets(path, weight=0.25, scale=2.0), Averager(step=5, grad_scale=grad_scale)
    sent = InFlight(path.rows, 5, Arrival(), True)
    path.apply(averager, sent, running)
    assert sent.arrival.waited == 1
    received, *delivered = path.encoder.told
    assert received[0] == "receive"
    assert received[1] is sent.rows
    assert received[2:] == (1, 5)
    fill = 0.0 if grad_scale is None else float("inf")
    assert delivered == [
        ("deliver", ["first"], 0.25, 2.0, fill),
        ("deliver", ["second", "third"], 0.25, 2.0, fill),
    ]
    assert averager.flags.skipped is path.encoder.verdict, "the host does not know"
    assert not averager.counted


def test_a_member_takes_no_gradient_out_of_a_residual_that_it_has_not():
    path, _ = device_path(rank=1, clusters=((0, 1), (2, 3)))
    path.apply(Averager(), InFlight(path.rows, 0, Arrival(), True), two_buckets(path, weight=0.25))
    assert [told[2] for told in path.encoder.told[1:]] == [0.0, 0.0]
    assert path.encoder.told[0][2] == path.topology.cluster == 0


@pytest.mark.parametrize(("dropped", "grad_scale"), [(False, None), (True, None), (True, lambda: 2.0)])
def test_the_outcome_is_reported_once(dropped, grad_scale):
    path, _ = device_path()
    running, averager = two_buckets(path), Averager(grad_scale=grad_scale)
    running.accumulated(True, (1.0, 3.5))
    path.settle(averager)
    assert not averager.counted, "nothing is known yet"
    path.apply(averager, InFlight(path.rows, 4, Arrival(), True), running)
    path.encoder.known = Outcome(4, dropped, 0 if dropped else 6)
    path.settle(averager)
    path.settle(averager)
    assert averager.counted == [(0 if dropped else 6, 2.5)]
    assert averager.noted == ([(4, "on some rank")] if dropped and grad_scale is None else [])


def test_what_the_device_raises_reaches_the_user():
    path, _ = device_path()

    def refuse():
        raise ValueError("the gradient message of rank 1 is refused")

    path.encoder.outcome = refuse
    with pytest.raises(ValueError, match="of rank 1 is refused"):
        path.settle(Averager())


def test_an_optimizer_gets_the_marks_of_each_parameter_with_a_gradient():
    path, _ = device_path()
    path.encoder.touched[torch.tensor([0, 3, 5])] = True
    parameters = dict(zip(SIZES, path.model.slots, strict=True))
    for name in ("first", "third"):
        parameters[name].grad = torch.ones(SIZES[name])
    marks = {name: path.blocks(BackwardPass()).get(p) for name, p in parameters.items()}
    assert marks["second"] is None
    assert marks["first"].marks.tolist() == [True, False, False]
    assert marks["third"].marks.tolist() == [True]
    assert marks["first"].grad is parameters["first"].grad
    path.encoder.touched[1] = True
    assert path.blocks(BackwardPass())[parameters["first"]].marks.tolist() == [True, True, False]


def test_the_host_can_go_on_with_its_residuals():
    path, _ = device_path(hold_unused=True)
    path.keep_frozen({"frozen": torch.ones(2)})
    host = path.on_host("histogram")
    assert isinstance(host, HostPath)
    torch.testing.assert_close(host.encoder.residual, path.encoder.residual)
    assert host.encoder.residual is not path.encoder.residual
    assert host.encoder.form == path.encoder.form
    assert host.encoder.selector == "histogram"
    assert host.hold_unused
    assert not device_path()[0].on_host("histogram").hold_unused
    assert set(host.residuals()) == {*SIZES, "frozen"}
    assert host.rows is path.rows


def test_its_state_is_that_of_selection():
    path, _ = device_path()
    other, _ = device_path()
    path.encoder.state.begin(0.5)
    other.load_state(path.state())
    assert other.encoder.state.threshold == 0.5
    assert path.state()["selector"] == path.encoder.state.state_dict()

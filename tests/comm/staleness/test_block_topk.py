"""Compressed sums that come a step later, against a simulation in one process; nothing is lost wherever one cuts."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero import BlockTopK
from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors.block_topk import BlockTopKAverager
from lightning_hetero.comm.compressors.manager import GradientCompression
from lightning_hetero.comm.gradients.ddp_hook import HookState, gradient_hook
from lightning_hetero.comm.staleness.block_topk import BlockTopKStaleAverager
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.compression import Layout, compress, merge
from lightning_hetero.core.compression.objective import DensityChoice
from lightning_hetero.core.compression.settings import blocks_per_rank
from tests.comm.compressors.block_steps import Bucket
from tests.comm.contexts import context_of
from tests.helpers import run_ranks

STEPS, TINY = 9, 1e-5
SETTINGS = BlockTopK(density=0.4, block=8, warmup_steps=1)
CLOSE = {"rtol": 2e-4, "atol": 2e-6}


class Simulation:
    """Delay-1 SGD with block top-k and error feedback on every worker, in one process.

    Args:
        model: whose parameters are trained.
        optimizer: of these parameters.
        settings: of the compressor.
        world_size: workers.
        clip: greatest norm of the gradient that the optimizer gets.
    """

    def __init__(self, model, optimizer, settings, world_size, clip=None):
        self.model, self.optimizer, self.settings, self.clip = model, optimizer, settings, clip
        self.layout = Layout.of([(name, p.numel()) for name, p in model.named_parameters()], settings.block)
        self.k = blocks_per_rank(self.layout.num_blocks, settings.density, world_size)
        self.residuals = [torch.zeros(self.layout.numel) for _ in range(world_size)]
        self.owed, self.returning, self.given, self.steps = None, [], [], 0

    def step(self, gradients, delayed, bad=None):
        """One step: weighted gradients of all workers, whether it is delayed, and whose gradient is not finite."""
        settings, number = self.settings, self.steps
        self.steps += 1
        every = settings.dense_every
        if number < settings.warmup_steps or (every is not None and number % every == 0):
            now = sum(gradients)
            self._return()
            delivered, self.owed = now if self.owed is None else now + self.owed, None
        elif bad is not None and not delayed:
            self._return()
            delivered, self.owed = self.owed, None
        else:
            packs = [
                None
                if rank == bad
                else compress(r, g, 1.0, self.k, block=settings.block, value_dtype=settings.value_dtype)
                for rank, (r, g) in enumerate(zip(self.residuals, gradients, strict=True))
            ]
            self._return()
            now = None if bad is not None else merge(packs, self.layout.num_blocks, block=settings.block)
            self.returning = [] if bad is None else [(r, p) for r, p in zip(self.residuals, packs, strict=True) if p]
            if delayed:
                delivered, self.owed = self.owed, now
            else:
                delivered, self.owed = now if self.owed is None else now + self.owed, None
        self.apply(delivered)

    def _return(self):
        """Workers learn of a message that nobody applied only after they have sent the next one."""
        for residual, pack in self.returning:
            residual.view(-1, self.settings.block).index_add_(0, pack.indices, pack.values)
        self.returning = []

    def apply(self, delivered):
        delivered = torch.zeros(self.layout.numel) if delivered is None else delivered
        for p, slot in zip(self.model.parameters(), self.layout.slots, strict=True):
            p.grad = delivered[slot.start : slot.start + slot.numel].view_as(p).to(p.dtype).clone()
        self.given.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]).numpy().copy())
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()

    def flat(self):
        """The model's gradients as a padded flat tensor."""
        out = torch.zeros(self.layout.numel)
        for p, slot in zip(self.model.parameters(), self.layout.slots, strict=True):
            out[slot.start : slot.start + slot.numel] = p.grad.flatten()
        return out


class Crossed(nn.Module):
    """Layers are not listed in the order in which they are used, so that DDP's buckets change after the first step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        for name, sizes in (("2", (9, 8)), ("4", (8, 1)), ("0", (6, 9))):
            self.add_module(name, nn.Linear(*sizes))

    def forward(self, x):
        for name in ("0", "2"):
            x = self.get_submodule(name)(x).tanh()
        return self.get_submodule("4")(x)


def loss_of(model, rank, step, bad=None):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + step))
    return model(x).square().mean() * (float("nan") if bad == (rank, step) else 1.0)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def simulated(schedule, settings, world_size, bad=None):
    model = Crossed()
    simulation, delayed = Simulation(model, sgd(model), settings, world_size), False
    for step in range(STEPS):
        delayed = schedule.get(step, delayed)
        gradients = []
        for rank in range(world_size):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            gradients.append(simulation.flat() / world_size)
        simulation.step(gradients, delayed, bad[0] if bad and bad[1] == step else None)
    return np.stack(simulation.given)


def start(rank, world_size, settings, limit=1, restored=None):
    model = Crossed()
    ddp = DistributedDataParallel(model, bucket_cap_mb=TINY)
    state = HookState(StepTimer(HostClock()), world_size)
    compression = GradientCompression(settings, ControlPlane(rank, world_size), state)
    compression.attach(model)
    late = BlockTopKStaleAverager(
        limit,
        compression.averager,
        dict(model.named_parameters()),
        clock=HostClock(),
        topology=Topology.flat_over(rank, world_size).with_own_groups(),
        restored=restored,
        hold=state.hold,
    )
    state.set_staleness(late)
    ddp.register_comm_hook(state, gradient_hook)

    def follow(stale, density=settings.density):
        """What a controller decides."""
        compression.apply_choice(DensityChoice(density, 10, 1.0, 1.0, 1.0, 1.0, stale=stale), stale)

    return ddp, late, follow


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors]).numpy().copy()


def _train(rank, world_size, schedule, settings, bad, look):
    """What the optimizer got in each step; if asked for, also what is left, owed and was computed up to there."""
    dist.init_process_group("gloo")
    ddp, late, follow = start(rank, world_size, settings)
    model, alone, optimizer = ddp.module, copy.deepcopy(ddp.module), sgd(ddp.module)
    given, left, owed, computed = [], [], [], []
    for step in range(STEPS):
        if step in schedule:
            follow(*(schedule[step] if isinstance(schedule[step], tuple) else (schedule[step],)))
        alone.load_state_dict(model.state_dict())
        for replica in (alone, model):
            replica.zero_grad()
        loss_of(alone, rank, step).backward()
        loss_of(ddp, rank, step, bad).backward()
        late.averager.after_backward()
        given.append(flat(p.grad for p in model.parameters()))
        computed.append(flat(p.grad for p in alone.parameters()) / world_size)
        if look:
            names = [name for name, _ in model.named_parameters()]
            residuals, sums = late.averager.residuals(), late.state_dict().get("sums", {})
            left.append(flat(residuals[name] for name in names))
            owed.append(flat(sums[name] for name in names) if sums else np.zeros_like(given[0]))
        optimizer.step()
    last = late.drain()
    assert late.drain() == {}, "a sum was handed out twice"
    if look and last:
        np.testing.assert_array_equal(flat(last[name] for name in names), owed[-1])
    return [np.stack(values) if values else None for values in (given, left, owed, computed)]


SCHEDULES = {
    "all, from the first compressed step": ({0: True}, SETTINGS),
    "on, off, on, with dense steps between": ({2: True, 4: False, 5: True}, BlockTopK(0.4, 8, "int8", dense_every=6)),
}
BAD = (1, 6)


@pytest.mark.parametrize("bad", [None, BAD], ids=["", "not finite"])
@pytest.mark.parametrize("case", SCHEDULES.values(), ids=SCHEDULES)
def test_gradients_are_those_of_the_simulation(case, bad):
    """Bit by bit the same on all ranks. Another rank's gradient that is not finite is learnt of a step later."""
    schedule, settings = case
    bad = (1, 7) if bad and settings.dense_every else bad
    results = run_ranks(_train, 2, 2, schedule, settings, bad, False)
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_allclose(results[0][0], simulated(schedule, settings, 2, bad), **CLOSE)
    assert bad is None or (results[0][0][bad[1] + 1] == 0).all(), "something of a step that was left out was applied"


@pytest.mark.parametrize("case", [(2, None), (3, BAD)], ids=str)
def test_applied_owed_and_left_make_up_all_gradients_at_every_step(case):
    """Wherever a run is cut; only the gradient that is not finite is missing, on the rank that had it."""
    world_size, bad = case
    results = run_ranks(_train, world_size, world_size, {1: True, 3: False, 4: True}, SETTINGS, bad, True)
    given, _, owed, _ = results[0]
    computed = [parts[3].copy() for parts in results]
    if bad:
        computed[bad[0]][bad[1]] = 0.0
    total = given.cumsum(0) + owed + sum(parts[1] for parts in results)
    np.testing.assert_allclose(total, np.sum(computed, axis=0).cumsum(0), **CLOSE)
    assert (np.abs(owed).max(axis=1) > 0).tolist() == [step not in (0, 3, bad and bad[1]) for step in range(STEPS)]
    for parts in results:
        np.testing.assert_array_equal(parts[2], owed)


def test_nothing_is_lost_when_the_density_changes_while_messages_are_under_way():
    """Up and down with delays, then at once with the end of the delay, then with its beginning."""
    schedule = {1: (True, 0.4), 3: (True, 0.1), 4: (True, 0.8), 6: (False, 0.2), 7: (True, 0.4)}
    results = run_ranks(_train, 2, 2, schedule, SETTINGS, None, True)
    given, _, owed, _ = results[0]
    computed = np.sum([parts[3] for parts in results], axis=0)
    np.testing.assert_allclose(given.cumsum(0) + owed + sum(parts[1] for parts in results), computed.cumsum(0), **CLOSE)
    np.testing.assert_array_equal(given, results[1][0])
    sent = (owed != 0).mean(axis=1)
    assert sent[3] < sent[2] / 2 < sent[4] / 3, "the messages have not changed"
    for step in (3, 4):
        np.testing.assert_array_equal(given[step], owed[step - 1])
    assert (owed[[0, 6]] == 0).all()


def test_messages_under_way_are_read_in_the_form_in_which_they_were_sent():
    """A checkpoint waits for them, and so would hide a change of the density that does not."""
    schedule = {1: (True, 0.4), 3: (True, 0.1), 4: (True, 0.8), 6: (False, 0.2), 7: (True, 0.4)}
    looked, alone = (run_ranks(_train, 2, 2, schedule, SETTINGS, None, look)[0][0] for look in (True, False))
    np.testing.assert_array_equal(alone, looked)


def test_a_dense_sum_that_is_left_out_still_owes_what_it_held():
    """Step 6 is dense, holds the delayed sum of step 5, and is not finite: that sum is applied in step 7."""
    settings = BlockTopK(density=0.4, block=8, warmup_steps=1, dense_every=6)
    results = run_ranks(_train, 2, 2, {1: True}, settings, BAD, True)
    given, _, owed, _ = results[0]
    computed = np.sum([parts[3] for parts in results], axis=0)
    computed[6] = 0.0
    np.testing.assert_array_equal(given[6], 0.0)
    np.testing.assert_array_equal(given[7], owed[5])
    assert np.abs(given[7]).max() > 0
    total = given.cumsum(0) + owed + sum(parts[1] for parts in results)
    np.testing.assert_allclose(total, computed.cumsum(0), **CLOSE)


def _left_out(rank, dense_every, look):
    """Whether each step said that something was left out, whoever has waited for messages between two steps."""
    dist.init_process_group("gloo")
    settings, said = BlockTopK(density=0.4, block=8, warmup_steps=1, dense_every=dense_every), []
    ddp, late, follow = start(rank, 2, settings)
    for step in range(STEPS):
        if step == 1:
            follow(True)
        ddp.zero_grad()
        loss_of(ddp, rank, step, BAD).backward()
        late.after_backward()
        said.append(bool(late.flags.skipped))
        if look:
            state = late.state_dict()
        if look == "load":
            late.load_state_dict(state)
    return said


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("dense_every", [None, BAD[1] + 1], ids=["", "before a dense step"])
def test_a_step_says_that_the_messages_of_the_step_before_were_left_out(dense_every, look):
    expected = [step == BAD[1] + 1 for step in range(STEPS)]
    assert run_ranks(_left_out, 2, dense_every, look) == [expected, expected]


def test_what_was_left_out_before_a_checkpoint_was_loaded_is_not_said_after_it():
    assert run_ranks(_left_out, 2, None, "load") == [[False] * STEPS] * 2


def _drained(rank):
    """Whether an optimizer that takes blocks has some, before and after the last sums are handed out."""
    dist.init_process_group("gloo")
    ddp, late, follow = start(rank, 2, SETTINGS)
    late.averager.sparse_steps = 1.0
    follow(True)
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp, rank, step).backward()
        late.after_backward()
    before = late.averager.gradients
    return bool(late.drain()), before is not None, late.averager.gradients is not None


def test_an_optimizer_takes_the_last_sums_densely():
    assert run_ranks(_drained, 2) == [(True, True, False)] * 2


def _successor(rank):
    dist.init_process_group("gloo")
    late = start(rank, 2, SETTINGS)[1]
    before = late.for_dense_sums(None).keeps_own
    late.keep_own()
    return before, late.for_dense_sums(None).keeps_own


def test_dense_sums_go_on_keeping_own_parts_for_who_looks_ahead():
    assert run_ranks(_successor, 2) == [(False, True)] * 2


def steps_with_a_bad_one(rank):
    """Who averages, behind each step of a run with stale messages; the gradient of one step is not finite."""
    dist.init_process_group("gloo")
    ddp, late, follow = start(rank, 2, SETTINGS)
    follow(True)
    for step in range(STEPS):
        ddp.zero_grad()
        loss_of(ddp, rank, step, BAD).backward()
        late.after_backward()
        yield late


def _saved_at_once(rank):
    """Residuals of each step, copied at once, and what they are when messages were waited for."""
    found = []
    for late in steps_with_a_bad_one(rank):
        at_once = flat(late.averager.residuals().values())
        late.wait()
        found.append((at_once == flat(late.averager.residuals().values())).all())
    return found


def test_residuals_have_what_was_sent_in_vain():
    """Which is known once messages were waited for; a checkpoint may look at residuals first."""
    assert run_ranks(_saved_at_once, 2) == [[True] * STEPS] * 2


def _exact(rank, delayed):
    dist.init_process_group("gloo")
    settings, said = BlockTopK(density=0.4, block=8, warmup_steps=1, dense_every=7), []
    ddp, late, follow = start(rank, 2, settings)
    follow(delayed)
    for step in range(STEPS):
        ddp.zero_grad()
        loss_of(ddp, rank, step).backward()
        said.append(late.flags.exact)
    return said


@pytest.mark.parametrize(("delayed", "exact"), [(False, (0, 7)), (True, (0,))])
def test_a_dense_sum_is_exact_unless_it_holds_that_of_the_step_before(delayed, exact):
    assert run_ranks(_exact, 2, delayed) == [[step in exact for step in range(STEPS)]] * 2


def _foretold(rank):
    """How many parameters something is known of, behind each step."""
    known = []
    for late in steps_with_a_bad_one(rank):
        sums = late.predicted_sums([0.5], 0.5)
        known.append(sum(values is not None for _, values in sums.values()))
    return known


def test_nothing_is_foretold_of_a_gradient_that_is_not_finite():
    for rank, known in enumerate(run_ranks(_foretold, 2)):
        assert [bool(number) for number in known] == [step > 0 and (rank, step) != BAD for step in range(STEPS)]


def _without_delays(rank):
    """A run without staleness goes on from one that delayed all messages."""
    dist.init_process_group("gloo")
    names = [name for name, _ in Crossed().named_parameters()]
    late = start(rank, 2, SETTINGS, limit=0, restored={"delayed": names, "sums": {}, "rate": None})[1]
    return late.stale, late.stale_share


def test_without_staleness_nothing_of_a_checkpoint_is_delayed():
    assert run_ranks(_without_delays, 2) == [(False, 0.0)] * 2


def _in_part(rank):
    """What the optimizer got, what is left and what was computed, where the last bucket alone is not finite once."""
    dist.init_process_group("gloo")
    ddp, late, follow = start(rank, 2, SETTINGS)
    model, alone, optimizer, step = ddp.module, copy.deepcopy(ddp.module), sgd(ddp.module), 0
    model.get_submodule("0").weight.register_hook(lambda g: g * (float("nan") if (rank, step) == BAD else 1.0))
    given, computed, names = 0.0, 0.0, [name for name, _ in model.named_parameters()]
    for step in range(STEPS):  # noqa: B007 - the hook reads it
        if step == 1:
            follow(True)
        alone.load_state_dict(model.state_dict())
        for replica in (alone, ddp):
            replica.zero_grad()
            loss_of(replica, rank, step).backward()
        late.after_backward()
        given += flat(p.grad for p in model.parameters())
        computed += flat(p.grad for p in alone.parameters()) / 2 * ((rank, step) != BAD)
        optimizer.step()
    sums, residuals = late.drain(), late.averager.residuals()
    return given + flat(sums[name] for name in names), flat(residuals[name] for name in names), computed


def test_of_a_gradient_that_is_not_finite_in_part_nothing_is_kept():
    """Its finite buckets are in the residual already when the last one turns out not to be."""
    results = run_ranks(_in_part, 2)
    total = results[0][0] + sum(left for _, left, _ in results)
    np.testing.assert_allclose(total, sum(computed for *_, computed in results), **CLOSE)


def _limit(rank):
    dist.init_process_group("gloo")
    late = start(rank, 2, SETTINGS, limit=0)[1]
    dist.barrier()
    late.make_stale(True)


def test_a_delay_without_staleness_is_refused_on_every_rank():
    errors = run_ranks(_limit, 2, expect_errors=True)
    assert [(rank, "staleness=1" in message) for rank, _, message in errors] == [(0, True), (1, True)]


def _kinds(rank):
    dist.init_process_group("gloo")
    ddp, late, follow = start(rank, 2, BlockTopK(density=0.4, block=8, warmup_steps=1, dense_every=4))
    follow(True)
    kinds = []
    for step in range(6):
        ddp.zero_grad()
        loss_of(ddp, rank, step).backward()
        kinds.append(late.step_kind)
    return kinds


def test_a_dense_step_says_that_it_delayed_nothing():
    everything = frozenset(name for name, _ in Crossed().named_parameters())
    expected = [everything if step % 4 else frozenset() for step in range(6)]
    assert run_ranks(_kinds, 2) == [expected, expected]


def test_the_step_after_a_dense_one_is_no_measurement_of_the_link():
    """It would be counted from the end of a step whose messages the timer has not seen."""
    p = nn.Parameter(torch.zeros(64))
    averager = BlockTopKAverager(SETTINGS, context_of({"w": p}, 2))
    late, bucket = BlockTopKStaleAverager(1, averager, {"w": p}, clock=HostClock()), Bucket([p])
    for dense in (False, True, False, False):
        if dense:
            late.add_to_dense(bucket)
        else:
            release = late._timer.ready(0)
            late._timer.send()()
            release()
    steps = late.pack().reshape(-1, 3)[:, 0]
    assert steps[np.isfinite(steps)].tolist() == [4]

"""Workers that are lost and come: who trains together next, who waits for whom, and from whose state they go on.

Keepers and workers are threads of this process, by a clock that is counted, and meet in a store in memory.
"""

import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_hetero.comm.membership import group_sockets
from lightning_hetero.comm.membership import roster as module
from lightning_hetero.comm.membership.group_sockets import connect, making_group, shut_down_groups
from lightning_hetero.comm.membership.members import Generation, Member, MembershipError, TrainingOverError
from lightning_hetero.comm.membership.members_watch import STUCK
from lightning_hetero.comm.membership.roster import Roster, RosterSettings
from lightning_hetero.comm.membership.slots import GONE, OVER, RUNS, SILENT, Pulse, Slot, SlotBoard
from lightning_hetero.strategies._lightning.membership.launcher import lost_connection
from tests.promises.virtual import VirtualTime

SLOTS, SETTINGS = 3, RosterSettings(poll_s=0.25)


class Job:
    """Slots with keepers that the test plays, which beat until their host is lost, and workers in threads."""

    def __init__(self, clock, least=1):
        self.clock, self.least, self.store, self.workers, self.hosts = clock, least, dist.HashStore(), {}, set()
        self.board = SlotBoard(self.store)
        for slot in range(SLOTS):
            clock.run(f"host {slot}", self._beat, slot)
            self.begin(slot, 0)

    def _beat(self, slot):
        count = 0
        while True:
            self.board.beat(slot, count := count + 1)
            time.sleep(1.0)

    def begin(self, slot, life):
        self.board.tell(slot, life, RUNS)
        self.clock.owner = (slot, life)
        worker = self.workers[slot] = Roster(SlotBoard(self.store), Slot(slot, SLOTS, life, self.least), SETTINGS)
        self.clock.owner = None
        return worker

    def lose(self, slot, state=GONE):
        worker = self.workers.pop(slot)
        self.clock.frozen.add((slot, worker.slot.life))
        self.board.tell(slot, worker.slot.life, state)

    def lose_host(self, slot):
        """Nobody says that the worker is lost."""
        worker = self.workers.pop(slot)
        self.clock.frozen |= {(slot, worker.slot.life), f"host {slot}"}

    def come(self, *slots):
        """Let these workers come for the next generation; what each finds, or its error, once it is there."""
        return {slot: self.clock.run((slot, self.workers[slot].slot.life), self.workers[slot].meet) for slot in slots}

    def met(self, *slots, seconds=30.0):
        """The members of the generation that these workers find, who all have come to the same."""
        found = self.come(*slots)
        self.clock.until(lambda: all(found.values()), seconds)
        (generation,) = {one.get("result", one.get("error")) for one in found.values()}
        return generation.number, {one.slot: one.life for one in generation.members}


@pytest.fixture
def clock():
    with VirtualTime() as clock:
        yield clock


@pytest.fixture
def job(clock):
    made = Job(clock)
    assert made.met(2, 0, 1) == (0, {0: 0, 1: 0, 2: 0})
    return made


ALL = {0: 0, 1: 0, 2: 0}


def test_ranks_are_the_order_of_the_slots_and_stay_so(job):
    assert [(job.workers[slot].rank, job.workers[slot].world_size) for slot in range(SLOTS)] == [(0, 3), (1, 3), (2, 3)]
    job.lose(1)
    assert job.met(2, 0) == (1, {0: 0, 2: 0})
    assert [(job.workers[slot].rank, job.workers[slot].world_size) for slot in (0, 2)] == [(0, 2), (1, 2)]


def test_the_first_generation_waits_for_every_slot(clock):
    job = Job(clock)
    found = job.come(0, 2)
    clock.pass_(100.0)
    assert found == {0: {}, 2: {}}
    assert job.met(1) == (0, ALL)


def test_a_survivor_in_a_long_step_is_waited_for_however_long_and_named(job, caplog):
    caplog.set_level("INFO", "lightning_hetero")
    job.clock.computes = 1.0
    job.lose(1)
    found = job.come(0)
    job.clock.pass_(5.0)
    assert caplog.messages == []
    job.clock.pass_(650.0)  # longer than newcomers are waited for
    assert found == {0: {}}
    assert "worker 2" in caplog.messages[0]
    assert "worker 1" not in caplog.text
    assert job.met(2) == (1, {0: 0, 2: 0})


@pytest.mark.parametrize("how", ["lose", "lose_host"])
def test_a_survivor_that_is_lost_while_the_others_wait_is_left_out(job, how):
    job.lose(1)
    found = job.come(0)
    job.clock.pass_(5.0)
    getattr(job, how)(2)
    job.clock.until(lambda: found[0], 30.0)
    assert found[0]["result"].members == (Member(0, 0),)


def test_a_newcomer_waits_until_the_members_come_to_the_next_generation(job):
    job.lose(1)
    job.met(0, 2)
    assert not job.workers[0].changes(0.0)
    job.begin(1, 1)
    found = job.come(1)
    job.clock.pass_(10.0)
    assert found == {1: {}}
    assert all(job.workers[slot].next_is_open and job.workers[slot].changes(0.0) for slot in (0, 2))
    assert job.met(0, 2) == (2, {0: 0, 1: 1, 2: 0})
    assert found[1]["result"].number == 2


class StopsBehindItsSecondWrite:
    """A store whose owner stands still when it has come, and has written something besides."""

    def __init__(self, store, stop):
        self.store, self.stop, self.writes = store, stop, 0

    def __getattr__(self, name):
        return lambda *args: self._done(name, getattr(self.store, name)(*args))

    def _done(self, name, found):
        self.writes += name in ("set", "add", "compare_set")
        if self.writes == 2:
            self.stop()
            time.sleep(0.1)
        return found


@pytest.mark.parametrize("written", [None, False, True], ids=["as it begins", "before it wrote members", "after"])
def test_who_leads_a_generation_may_be_lost(job, written):
    """Whoever is among the members that were written down keeps to them, and leaves again; another goes on waiting."""
    job.lose(1)
    if written is None:
        board = job.workers[0].board
        board.store = StopsBehindItsSecondWrite(board.store, lambda: job.clock.frozen.add((0, 0)))
    job.come(0)
    job.clock.pass_(1.0)
    job.clock.frozen.add((0, 0))
    job.begin(1, 1)
    found = job.come(1, 2)
    job.clock.pass_(1.0)
    if written:
        Generation(1, (Member(0, 0), Member(2, 0))).write(job.board)
    job.lose(0)
    job.clock.until(lambda: found[2], 10.0)
    if written:
        assert found == {1: {}, 2: {"result": Generation(1, (Member(0, 0), Member(2, 0)))}}
        assert job.met(2) == (2, {1: 1, 2: 0})
    assert found[1]["result"] == Generation(2, (Member(1, 1), Member(2, 0)))


@pytest.mark.parametrize("gone", [None, "over", "host"], ids=str)
def test_when_all_are_lost_all_that_can_come_begin_anew_together(job, gone):
    for slot in range(SLOTS):
        job.lose(slot, OVER if (slot, gone) == (1, "over") else GONE)
    if gone == "host":
        job.clock.frozen.add("host 1")
    for slot in (0, 2):
        job.begin(slot, 1)
    found = job.come(0, 2)
    job.clock.pass_(60.0)
    if gone is None:
        assert found == {0: {}, 2: {}}, "one or two of three would begin alone"
        job.begin(1, 1)
        assert job.met(1)[1] == {0: 1, 1: 1, 2: 1}
    job.clock.until(lambda: all(found.values()), 1.0)
    members = {Member(slot, 1) for slot in ((0, 1, 2) if gone is None else (0, 2))}
    assert [set(one["result"].members) for one in found.values()] == [members] * 2


def test_a_worker_whose_keeper_falls_silent_is_lost(job):
    job.lose_host(1)
    found = job.come(0, 2)
    job.clock.until(lambda: found[0] and found[2], 30.0)
    assert {one.slot for one in found[0]["result"].members} == {0, 2}
    assert job.workers[0].board.state_of(1) == (0, SILENT)


@pytest.mark.parametrize(("state", "error"), [(GONE, TimeoutError), (OVER, MembershipError)])
def test_fewer_than_the_least_wait_and_then_name_who_is_missing(clock, state, error):
    job = Job(clock, least=3)
    job.met(0, 1, 2)
    job.lose(1, state)
    found = job.come(0, 2)
    clock.pass_(590.0 if state == GONE else 0.5)
    assert any(found.values()) == (state == OVER), "ten minutes, unless nobody can come"
    clock.until(lambda: any(found.values()), 30.0)
    (first,) = [slot for slot in found if found[slot]]
    assert isinstance(found[first]["error"], error)
    assert "1" in str(found[first]["error"])
    assert "--min-workers" in str(found[first]["error"])
    job.lose(first)
    clock.until(lambda: all(found.values()), 700.0)
    assert all(isinstance(one["error"], TimeoutError | MembershipError) for one in found.values())


def test_fewer_than_the_least_go_on_when_another_comes_in_time(clock):
    job = Job(clock, least=3)
    job.met(0, 1, 2)
    job.lose(1)
    job.come(0, 2)
    clock.pass_(500.0)
    job.begin(1, 1)
    assert job.met(1) == (1, {0: 0, 1: 1, 2: 0})


def test_a_training_that_has_ended_refuses_newcomers_all_of_them(job):
    job.workers[0].finish()
    for slot in (1, 2):
        job.lose(slot)
        job.begin(slot, 1)
    found = job.come(1, 2)
    job.clock.until(lambda: all(found.values()), 30.0)
    assert {type(one["error"]) for one in found.values()} == {TrainingOverError}


def test_the_members_of_a_training_that_has_ended_may_meet_for_another(job):
    """What was noted of a fit is that of this fit."""
    for worker in job.workers.values():
        worker.begin_fit()
    job.workers[0].note("plan", "8 4 4")
    assert job.workers[1].noted("plan") == "8 4 4"
    for worker in job.workers.values():
        worker.finish()
    assert job.board.finished([0])
    for worker in job.workers.values():
        worker.begin_fit()
    assert not job.board.finished(range(SLOTS))
    assert job.workers[1].noted("plan") is None
    assert job.met(0, 1, 2) == (1, ALL)


@pytest.mark.parametrize("over", [False, True], ids=["in a fit", "after the last one"])
def test_a_wait_for_the_address_of_a_lost_member_is_an_error(job, over):
    store = job.workers[0].make_store()
    if over:
        job.workers[0].finish()
    found = job.clock.run((0, 0), store.get, "address")
    job.clock.pass_(100.0)
    assert not found
    job.lose(2)
    job.clock.until(lambda: found, 10.0)
    assert lost_connection(found["error"]), "else the worker would not go on"


# a worker that is stuck after a loss


@pytest.fixture
def freed(monkeypatch):
    """How often this process has shut down its connections."""
    freed = []
    monkeypatch.setattr(module, "shut_down_groups", lambda: freed.append("connections") or 2)
    return freed


@pytest.mark.parametrize(
    ("happens", "computes", "lets_go", "ends"),
    [
        ("lost", 0.0, True, True),
        ("lost", 0.5, False, False),  # a long computation leads to a call that fails
        ("left", 0.0, True, True),  # it has lost a connection, and has come for the next generation
        ("newcomer", 0.0, False, False),
        ("finished", 0.0, False, False),  # it may wait for something else in the rest of its script
        ("meets", 0.0, False, False),  # it has left its step, and the others may be in a long one
    ],
)
def test_a_worker_that_waits_in_vain_lets_go_of_its_calls_and_then_ends(
    job, monkeypatch, capfd, freed, happens, computes, lets_go, ends
):
    if happens == "newcomer":
        job.lose(1)
        job.met(0, 2)
        job.begin(1, 1)
        job.come(1)
    job.workers[0].fail_by(lambda text: freed.append(text) or 1)
    job.clock.computes = computes
    if happens == "finished":
        job.workers[0].finish()
    if happens in ("lost", "meets", "finished"):
        job.lose(2)
    if happens in ("left", "meets"):
        job.come({"left": 2, "meets": 0}[happens])
    job.clock.frozen |= {(1, 0)}
    job.clock.pass_(5.0)
    assert freed[:1] == ["connections"] * lets_go, "first of its connections, so that others need not wait for it"
    assert len(freed) == 2 * lets_go
    assert not lets_go or lost_connection(RuntimeError(freed[1])), "else the worker would not go on"
    assert (0, 0) not in job.clock.ended
    job.clock.pass_(15.0)
    assert job.clock.ended.get((0, 0)) == (STUCK if ends else None)
    assert ("test_membership.py" in capfd.readouterr().err) == ends, "it says where it was"


def test_a_host_that_comes_back_in_time_leaves_nobody_stuck(job, freed):
    for _ in range(3):
        job.board.tell(2, 0, GONE)
        job.clock.pass_(10.0)
        job.board.tell(2, 0, RUNS)
        job.clock.pass_(10.0)
    assert job.clock.ended == {}
    assert freed


# what keepers tell


def test_a_pulse_is_of_its_life_and_falls_silent_under_a_debugger(clock, monkeypatch):
    board = SlotBoard(dist.HashStore())
    pulse = Pulse(board, Slot(0, 2, 3)).start()
    clock.pass_(1.5)
    assert board.pulse_of(0, 3)
    assert board.pulse_of(0, 4) == "", "that of an earlier life says nothing of a later one"
    pulse.stop()
    clock.pass_(10.0)
    assert board.pulse_of(0, 3).endswith("ends")
    Pulse(board, Slot(0, 2, 4)).start()
    clock.pass_(1.5)
    assert board.pulse_of(0, 4)
    monkeypatch.setitem(sys.modules, "pydevd", sys)
    clock.pass_(10.0)
    assert board.pulse_of(0, 4) == "", "its keeper kills what has been silent, and a user may look at a line for long"


# connections


@pytest.mark.parametrize("given", [None, 7.0, 0.5])
def test_a_lost_worker_is_not_waited_for_in_the_making_of_a_group(given, monkeypatch):
    """Gloo waits five times the timeout of a group for its connections, whose calls then have the one that is given."""
    timeout, made, has = given and timedelta(seconds=given), [], {}
    monkeypatch.setattr(group_sockets, "_set_pg_timeout", lambda timeout, group: has.update({group: timeout}))
    assert connect(lambda timeout: made.append(timeout) or "a group", timeout) == "a group"
    assert made[0] <= timedelta(seconds=2)
    assert has == {"a group": timeout or dist.default_pg_timeout}


def test_only_connections_of_groups_are_shut_down():
    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    with making_group():
        inside = socket.create_connection(listener.getsockname())
        server = socket.create_server(("127.0.0.1", 0))  # which gloo's thread needs
    first, second = listener.accept()[0], listener.accept()[0]
    assert shut_down_groups() == 1
    client.sendall(b"a")
    assert (first.recv(1), second.recv(1)) == (b"a", b"")
    reached = socket.create_connection(server.getsockname())
    for one in (listener, client, inside, server, first, second, reached, server.accept()[0]):
        one.close()

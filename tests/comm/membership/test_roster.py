"""Generations of members: who trains together after workers are lost and come, and what is refused."""

import threading
import time

import pytest
import torch.distributed as dist

from lightning_hetero.comm.membership import members_watch, slots
from lightning_hetero.comm.membership import roster as module
from lightning_hetero.comm.membership.members import Generation, Member, MembershipError, TrainingOverError
from lightning_hetero.comm.membership.roster import LET_GO, Roster, RosterSettings
from lightning_hetero.comm.membership.slots import GONE, OVER, RUNS, Slot, SlotBoard
from lightning_hetero.strategies._lightning.membership.launcher import lost_connection

QUICK = RosterSettings(poll_s=0.005, notice_s=0.05, join_s=0.5, stuck_s=60.0)
SLOTS = 3


class Job:
    """Slots with keepers that this test plays, and rosters in threads."""

    def __init__(self):
        self.store = dist.HashStore()
        self.rosters = {}
        for slot in range(SLOTS):
            self.begin(slot, 0)

    def board(self):
        return SlotBoard(self.store)

    def begin(self, slot, life, least=1):
        self.board().tell(slot, life, RUNS)
        self.rosters[slot] = Roster(self.board(), Slot(slot, SLOTS, life, least), QUICK)
        return self.rosters[slot]

    def lose(self, slot):
        roster = self.rosters.pop(slot)
        roster.leave()
        self.board().tell(slot, roster.slot.life, GONE)

    def meet(self, *which):
        """Let these rosters meet at once; the generation that each finds, or its error."""
        found = {}

        def go(slot):
            try:
                found[slot] = self.rosters[slot].meet()
            except Exception as error:  # noqa: BLE001 - the test looks at it
                found[slot] = error

        threads = [threading.Thread(target=go, args=(slot,), daemon=True) for slot in which]
        for thread in threads:
            thread.start()
        return threads, found

    def met(self, *which):
        threads, found = self.meet(*which)
        for thread in threads:
            thread.join(timeout=20)
            assert not thread.is_alive()
        return found

    def close(self):
        for roster in self.rosters.values():
            roster.leave()


@pytest.fixture
def job():
    made = Job()
    yield made
    made.close()


def members(*pairs):
    return tuple(Member(*pair) for pair in pairs)


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_all_slots_make_the_first_generation(job):
    found = job.met(2, 0, 1)
    assert set(found.values()) == {Generation(0, members((0, 0), (1, 0), (2, 0)))}
    assert [job.rosters[slot].rank for slot in range(SLOTS)] == [0, 1, 2]
    assert job.rosters[1].world_size == 3


def test_the_first_generation_waits_for_every_slot(job):
    threads, found = job.meet(0, 2)
    time.sleep(0.1)
    assert not found
    threads += job.meet(1)[0]
    for thread in threads:
        thread.join(timeout=20)
    assert found[0].members == members((0, 0), (1, 0), (2, 0))


def test_survivors_go_on_without_the_lost_one_and_keep_their_order(job):
    job.met(0, 1, 2)
    job.lose(1)
    found = job.met(0, 2)
    assert set(found.values()) == {Generation(1, members((0, 0), (2, 0)))}
    assert [job.rosters[slot].rank for slot in (0, 2)] == [0, 1]


def test_a_generation_waits_for_every_survivor(job):
    job.met(0, 1, 2)
    job.lose(1)
    threads, found = job.meet(0)
    time.sleep(0.1)
    assert not found, "worker 2 lives, and may be in a long step"
    threads += job.meet(2)[0]
    for thread in threads:
        thread.join(timeout=20)
    assert found[0].members == members((0, 0), (2, 0))


def test_a_survivor_that_is_lost_while_the_others_wait_is_left_out(job):
    job.met(0, 1, 2)
    job.lose(1)
    threads, found = job.meet(0)
    job.lose(2)
    threads[0].join(timeout=20)
    assert found[0].members == members((0, 0))


def test_a_newcomer_joins_when_the_members_come(job):
    job.met(0, 1, 2)
    job.lose(1)
    job.met(0, 2)
    job.begin(1, 1)
    threads, found = job.meet(1)
    deadline = time.monotonic() + 20
    while not all(job.rosters[slot].next_is_open for slot in (0, 2)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not found
    others = job.met(0, 2)
    threads[0].join(timeout=20)
    assert set(others.values()) | set(found.values()) == {Generation(2, members((0, 0), (1, 1), (2, 0)))}


def test_who_was_to_write_the_members_down_may_be_lost(job):
    job.met(0, 1, 2)
    job.lose(1)
    store = job.store
    store.set("1/in/1", "0")  # worker 1 was the first to come
    store.set("1/led by", "1 0")
    found = job.met(0, 2)
    assert set(found.values()) == {Generation(2, members((0, 0), (2, 0)))}


def test_who_has_written_the_members_down_may_be_lost_right_then(job):
    """The others are among them, and would wait for each other in two generations."""
    job.met(0, 1, 2)
    job.lose(1)
    job.store.set("1/led by", "2 0")
    written, board, read = Generation(1, members((0, 0), (2, 0))), job.rosters[0].board, SlotBoard.read

    def read_late(key):
        found = read(board, key)
        if key == "slot/2" and 2 in job.rosters:
            written.write(job.board())
            job.lose(2)
        return found

    board.read = read_late
    assert job.met(0) == {0: written}


def test_a_generation_that_was_made_without_a_newcomer_is_not_its_own(job):
    job.met(0, 1, 2)
    job.lose(1)
    job.store.set("1/led by", "0 0")
    job.begin(1, 1)
    threads, found = job.meet(1)
    wait_until(lambda: job.board().read("1/in/1") == "1")
    Generation(1, members((0, 0), (2, 0))).write(job.board())
    wait_until(lambda: job.store.check(["2/led by"]) or found)
    job.met(0, 2)
    threads[0].join(timeout=20)
    assert found[1] == Generation(2, members((0, 0), (1, 1), (2, 0)))


def test_all_lost_begin_anew_together(job):
    job.met(0, 1, 2)
    for slot in range(SLOTS):
        job.lose(slot)
        job.begin(slot, 1)
    threads, found = job.meet(0, 2)
    time.sleep(0.1)
    assert not found, "one of three would begin alone"
    threads += job.meet(1)[0]
    for thread in threads:
        thread.join(timeout=20)
    assert found[0].members == members((0, 1), (1, 1), (2, 1))


def test_a_slot_that_no_other_life_follows_is_not_waited_for(job):
    job.met(0, 1, 2)
    for slot in range(SLOTS):
        job.lose(slot)
    job.board().tell(1, 0, OVER)
    job.begin(0, 1)
    job.begin(2, 1)
    assert job.met(0, 2)[0].members == members((0, 1), (2, 1))


def test_a_slot_whose_host_is_gone_is_not_waited_for(job, monkeypatch):
    job.met(0, 1, 2)
    for slot in range(SLOTS):
        job.lose(slot)
    job.begin(0, 1)
    job.begin(2, 1)
    monkeypatch.setattr(SlotBoard, "_keeper_lives", lambda board, slot: slot != 1)
    assert job.met(0, 2)[0].members == members((0, 1), (2, 1))


def test_a_silent_keeper_counts_as_lost(job, monkeypatch):
    job.met(0, 1, 2)
    monkeypatch.setattr(slots, "SILENCE_S", 0.1)
    beating = threading.Event()

    def beat():
        count = 0
        while not beating.wait(0.01):
            count += 1
            for slot in (0, 2):
                job.board().beat(slot, count)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        found = job.met(0, 2)
    finally:
        beating.set()
        thread.join()
    assert found[0].members == members((0, 0), (2, 0)), "worker 1's host is gone, so nobody has said that it was lost"


def test_fewer_than_the_least_wait_and_then_name_who_is_missing(job):
    for slot in range(SLOTS):
        job.begin(slot, 0, least=3)
    job.met(0, 1, 2)
    job.lose(1)
    threads, found = job.meet(0, 2)
    deadline = time.monotonic() + 20
    while not found:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    [(first, error)] = found.items()
    assert isinstance(error, TimeoutError)
    assert "2 workers came within" in str(error)
    assert "at least 3 have to train: worker 1 did not come" in str(error)
    job.lose(first)  # its process ends, and the other one waits as long
    for thread in threads:
        thread.join(timeout=20)
    assert all(isinstance(one, TimeoutError) for one in found.values())


@pytest.mark.parametrize(("state", "refused"), [(OVER, True), (GONE, False)])
def test_nobody_waits_for_workers_that_no_other_follows(job, state, refused):
    for slot in range(SLOTS):
        job.begin(slot, 0, least=3)
    job.met(0, 1, 2)
    job.lose(1)
    job.board().tell(1, 0, state)
    threads, found = job.meet(0, 2)
    wait_until(lambda: found)
    [(first, error)] = found.items()
    said = "2 of 3 workers are left, and at least 3 have to train: no other follows on 1. Raise --max-restarts"
    assert (said in str(error)) == refused
    assert isinstance(error, MembershipError if refused else TimeoutError)
    job.lose(first)
    for thread in threads:
        thread.join(timeout=20)


def test_a_survivor_in_a_long_step_is_waited_for_and_named(job, caplog, monkeypatch):
    """However long it takes: the time that is bounded is that for newcomers that never come."""
    monkeypatch.setattr(module.log, "propagate", True)
    job.met(0, 1, 2)
    job.lose(1)
    job.rosters[0]._settings = RosterSettings(poll_s=0.005, notice_s=0.02, join_s=0.01)
    threads, found = job.meet(0)
    wait_until(lambda: caplog.messages or found)
    threads += job.meet(2)[0]
    for thread in threads:
        thread.join(timeout=20)
    assert found[0].members == members((0, 0), (2, 0))
    assert caplog.messages[0] == "waiting for worker 2 to come back, for 0 s"


def test_an_ended_training_refuses_a_newcomer(job):
    job.met(0, 1, 2)
    job.lose(1)
    job.met(0, 2)
    for slot in (0, 2):
        job.rosters[slot].finish()
    job.begin(1, 1)
    [error] = job.met(1).values()
    assert isinstance(error, TrainingOverError)
    assert "worker 1 was started again after the others had finished training" in str(error)


def test_an_ended_training_refuses_all_newcomers(job, monkeypatch):
    """Also one that waits for another to write the members down, whose script may go on after its error."""
    monkeypatch.setattr(slots, "SILENCE_S", 600.0)
    job.met(0, 1, 2)
    job.rosters[0].finish()
    for slot in (1, 2):
        job.lose(slot)
        job.begin(slot, 1)
    found = job.met(1, 2)
    assert sorted(str(error).partition(" was")[0] for error in found.values()) == ["worker 1", "worker 2"]


def test_a_worker_of_an_ended_training_is_watched_no_more(job):
    """The others end, and it may wait for something else in the rest of its script."""
    job.met(0, 1, 2)
    watch = job.rosters[0]._watch
    job.rosters[0].finish()
    assert not watch._thread.is_alive()


def test_a_worker_that_waits_for_the_others_to_come_is_not_watched(job):
    """They may be in a long step, and this one has left its own."""
    job.met(0, 1, 2)
    job.lose(1)
    watch = job.rosters[0]._watch
    threads, found = job.meet(0)
    wait_until(lambda: job.store.check(["1/in/0"]))
    assert not watch._thread.is_alive()
    assert not found
    threads += job.meet(2)[0]
    for thread in threads:
        thread.join(timeout=20)


def test_the_members_of_an_ended_training_may_meet_for_another(job):
    job.met(0, 1, 2)
    for slot in range(SLOTS):
        job.rosters[slot].finish()
    assert job.met(0, 1, 2)[0].number == 1


def test_lost_members_are_seen(job):
    job.met(0, 1, 2)
    roster = job.rosters[0]
    assert roster.lost == []
    assert not roster.changes(0.0)
    job.lose(2)
    assert roster.lost == list(members((2, 0)))
    assert roster.changes(0.0)


def test_what_groups_have_left_in_the_store_goes_with_the_next_generation(job):
    job.met(0, 1, 2)
    stores = [roster.make_store() for roster in job.rosters.values()]
    stores[0].set("address", "of its group")
    assert any("address" in key for key in job.store.list_keys())
    job.met(0, 1, 2)
    stores += [roster.make_store() for roster in job.rosters.values()]
    assert not any("address" in key for key in job.store.list_keys())


@pytest.mark.parametrize("over", [False, True], ids=["in a fit", "after the last one"])
def test_a_wait_for_the_address_of_a_lost_member_is_an_error(job, over):
    job.met(0, 1, 2)
    store = job.rosters[0].make_store()
    if over:
        job.rosters[0].finish()
    job.lose(2)
    with pytest.raises(RuntimeError):
        store.wait(["address"])


def test_an_opened_generation_is_a_change(job):
    job.met(0, 1, 2)
    job.store.set("1/led by", "2 0")
    assert job.rosters[0].changes(0.0)


def test_a_later_fit_of_the_script_is_not_over(job):
    job.met(0, 1, 2)
    first = job.rosters[0]
    first.begin_fit()
    first.finish()
    assert job.board().finished([0])
    first.begin_fit()
    assert not job.board().finished([0])


def test_a_worker_that_waits_in_vain_for_a_lost_one_lets_go(job, monkeypatch):
    """First of its connections, so that others need not wait for it, then of the sums that still wait."""
    done = []
    monkeypatch.setattr(module, "shut_down_groups", lambda: done.append("connections") or 2)
    monkeypatch.setattr(members_watch, "LET_GO_S", 0.05)
    monkeypatch.setattr(members_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(members_watch, "main_thread_seconds", lambda: 0.0)
    job.met(0, 1, 2)
    job.rosters[0].fail_by(lambda text: done.append(text) or 1)
    job.rosters[1].leave()
    job.lose(2)
    wait_until(lambda: len(done) == 2)
    assert done == ["connections", LET_GO]
    assert lost_connection(RuntimeError(LET_GO)), "else the worker would not go on"

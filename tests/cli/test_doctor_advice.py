"""Advice of ``lightning-hetero doctor`` by given findings: when it is given, when it is not, and its figures."""

from dataclasses import replace

import pytest

from lightning_hetero.cli.doctor.advice import advice, gain_over_even, link_advice, speed_advice
from lightning_hetero.cli.doctor.checkup import Checkup
from lightning_hetero.cli.doctor.link import LinkFacts
from tests.cli.findings import process, speed


def test_a_slow_rank_is_named_with_the_gain():
    found = speed_advice(Checkup((), 3, speeds={0: speed(2e12), 1: speed(2.1e12), 2: speed(1e12)}))
    assert found == [
        "rank 2 is 2.1 times slower than the fastest: with even batches the others wait. "
        'strategy="hetero_ddp" would give 1.7x, as far as computing limits the steps'
    ]
    assert gain_over_even([2.0, 2.1, 1.0]) == pytest.approx(5.1 / 3, rel=2e-3)
    assert "even batches are right" in speed_advice(Checkup((), 2, speeds={0: speed(1.0), 1: speed(1.02)}))[0]
    assert speed_advice(Checkup((), 1, speeds={0: speed(1.0)})) == []
    several = {0: speed(10.0), **{i: speed(1.6 - 0.1 * i) for i in range(1, 4)}}
    (three,) = speed_advice(Checkup((), 1, speeds=several))
    assert three.startswith("device 3 is 7.69 times slower, device 2 is 7.14 times slower, device 1 is 6.67 times")
    assert "more are slower" not in three
    (five,) = speed_advice(Checkup((), 1, speeds={**several, 4: speed(2.0), 5: speed(3.0)}))
    assert "device 4" not in five
    assert "than the fastest, and 2 more are slower, too: with even" in five


@pytest.mark.parametrize(
    ("speeds", "uneven"),
    [((1.08, 1.0), False), ((1.2, *[1.0] * 9), False), ((1.5, *[1.0] * 9), True), ((1.0, 0.9), True)],
    ids=["little slower", "a little to gain", "one fast worker", "slower"],
)
def test_uneven_batches_are_advised_where_they_gain(speeds, uneven):
    (text,) = speed_advice(Checkup((), len(speeds), speeds=dict(enumerate(map(speed, speeds)))))
    assert ("hetero_ddp keeps them" in text) is not uneven
    assert ("would give" in text) is uneven


def test_the_link_in_words():
    fast, slow = ((0, 1), (2, 3)), ((0, 1, 2, 3),)
    link = LinkFacts(
        "gloo", ((0.0,) * 4,) * 4, ((0.0,) * 4,) * 4, ((4096, 0.001), (65536, 0.002), (50_000_000, 0.5)), fast
    )
    found = link_advice(Checkup((), 4, link=link))
    assert "averages 100 MB of gradients a second (50 MB in 500 ms): communication-bound from 100 MB per" in found[0]
    assert "100 MB (25 million parameters) take 1 s" in found[0]
    assert 'set compression="auto"' in found[0]
    assert found[1] == 'the link between the ranks 0, 1 | 2, 3 is slower than the links inside: hierarchy="auto"'
    assert len(link_advice(Checkup((), 4, link=replace(link, clusters=slow)))) == 1
    assert len(link_advice(Checkup((), 4, link=replace(link, clusters=((0,), (1,), (2,), (3,)))))) == 1
    assert link_advice(Checkup((), 4)) == []
    assert link_advice(Checkup((), 4, link=replace(link, sums=()))) == []
    assert advice(Checkup((), 4, link=link)) == found


@pytest.mark.parametrize(
    ("rows", "speeds", "told"),
    [
        ([process(0), process(1)], {0: speed(1.0, 0.23)}, "rank 0 lost 23.0% of its speed within 5 s"),
        ([process(0), process(1, memory=8e9)], {}, "rank 1 has less memory than others (8 of 24 GB): set probe_memory"),
        ([process(0), process(1, memory=20e9)], {}, "rank 1 has less memory than others (20 of 24 GB)"),
        ([process(0), process(1, memory=8e9), process(2, memory=8e9)], {}, "rank 1 has less memory than others"),
        ([process(0), process(1, memory=23e9)], {}, ""),
        ([process(0, kind="cpu"), process(1, kind="cpu", memory=8e9)], {}, ""),
        ([process(0), process(1, memory_limit=10**10)], {}, "a cgroup allows rank 1 10 of the machine's 64 GB"),
        ([process(0, memory_limit=64 * 10**9)], {}, ""),
        ([process(0, memory_limit=10**10)], {}, "a cgroup allows rank 0 10 of the machine's 64 GB"),
        ([process(0, cores=1.5, threads=4)], {}, "rank 0 may use 1.5 cores, and torch runs 4 threads"),
        ([process(0, cores=1.5, threads=4)], {}, "Set OMP_NUM_THREADS=1"),
        ([process(0, cores=0.5, threads=1)], {}, "More cores would help"),
        ([process(0, cores=4.0, threads=4)], {}, ""),
        ([process(0, kind="cpu", load=7.0)], {0: speed(1.0)}, "other programs used the machine of rank 0 (load 7 on 8"),
        ([process(0, kind="cpu", load=3.0)], {0: speed(1.0)}, ""),
        ([process(0, kind="cpu", load=7.0)], {}, ""),
        ([process(0, load=7.0)], {0: speed(1.0)}, ""),
        ([process(0)], {}, ""),
    ],
)
def test_advice_on_one_thing_is_one_sentence(rows, speeds, told):
    found = advice(Checkup(tuple(rows), 2, speeds=speeds))
    assert [told in text for text in found] == [True] * bool(told)


def test_a_process_of_its_own_is_told_how_to_check_a_job():
    alone = Checkup((process(0),), seconds=60.0, speeds={0: speed(1.0, 0.23)})
    slow, start = advice(alone)
    assert slow.startswith("device 0 lost 23.0% of its speed within 60 s")
    assert start.startswith("to measure the link between workers, start one process per worker: torchrun")
    assert advice(replace(alone, failures=("rank 1 did not come",))) == [slow], "it was started as one"
    assert advice(replace(alone, world_size=2, speeds={})) == []
    limited = replace(alone, rows=(process(0, memory_limit=10**10),), speeds={})
    assert advice(limited)[0].startswith("a cgroup allows device 0 10 of the machine's 64 GB")

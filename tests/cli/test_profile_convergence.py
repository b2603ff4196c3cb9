"""``lightning-hetero profile-convergence``: what it tells scripts, what it makes of answers, what can go wrong."""

import json
import sys
import time

import psutil
import pytest

from lightning_hetero import cli
from lightning_hetero.core.compression.convergence_profile import ConvergenceProfile

# In place of a training: answers as the strategy does, with a loss that is known.
SCRIPT = """
import json, os, sys, time
order = json.loads(os.environ["LIGHTNING_HETERO_PROBE"])
here = os.path.dirname(__file__)
with open(os.path.join(here, "orders"), "a") as file:
    file.write(json.dumps({**order, "seed": os.environ["PL_GLOBAL_SEED"], "arguments": sys.argv[1:],
                           "launched": os.environ.get("LAUNCHED")}) + "\\n")
number = sum(1 for _ in open(os.path.join(here, "orders")))
AT_PROBE
trained = order["samples"] > 0
loss = 0.5 * (1 + order["rate"] * order["staleness"] + (order["total"] or 0) / 1000) if trained else None
answer = {"loss": loss, "samples": order["samples"], "staleness": order["staleness"], "world_size": 2,
          "total": order["total"] or 32, "dataset": 800, "min_local": 1}
json.dump(answer, open(order["report"], "w"))
"""


def orders_of(folder):
    return [json.loads(line) for line in (folder / "orders").read_text().splitlines()]


@pytest.fixture
def profile(tmp_path):
    """Profiles a script that does something of its own before it answers."""

    def _profile(*options, at_probe="", arguments=()):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.replace("AT_PROBE", at_probe))
        (tmp_path / "orders").unlink(missing_ok=True)
        argv = ["profile-convergence", "--output", str(tmp_path / "profile.json"), *options, str(script), *arguments]
        return cli.main(argv)

    return _profile


def test_probes_are_those_of_the_search_and_their_answers_are_the_profile(profile, tmp_path, capsys):
    launcher = f"env LAUNCHED=twice {sys.executable}"
    assert profile("--probes", "5", "--seed", "7", "--launcher", launcher, arguments=["--lr", "3"]) == 0
    described, baseline, *probes = orders_of(tmp_path)
    assert described["samples"] == 0
    assert described["total"] is None
    assert (baseline["samples"], baseline["total"], baseline["rate"], baseline["staleness"]) == (400, 29, 0.0, 0)
    assert [order["staleness"] for order in probes] == [1] * 5
    assert all(order["arguments"] == ["--lr", "3"] and order["seed"] == "7" for order in [described, *probes])
    assert all(order["launched"] == "twice" for order in [described, baseline, *probes])
    found = ConvergenceProfile.load(tmp_path / "profile.json")
    assert (found.min_total, found.max_total) == (8, 50)
    assert found.baseline == pytest.approx(0.5 * 1.029)
    for (rate, total, extra), order in zip(found.points, probes, strict=True):
        assert (rate, total) == (order["rate"], order["total"])
        assert extra == pytest.approx((1 + rate + total / 1000) / 1.029 - 1)
    assert not (tmp_path / "profile.json.partial").exists()
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "5 probe trainings of 400 samples, total batches from 8 to 50"
    assert told[2].startswith("probe 1: rate ")
    assert told[-1].startswith(f"wrote {tmp_path / 'profile.json'}: 5 probe trainings, extra loss from ")


def test_the_seed_decides(profile, tmp_path):
    ranges = ("--samples", "400", "--min-total", "4", "--max-total", "50", "--probes", "2")
    texts = []
    for seed in ("1", "1", "2"):
        assert profile(*ranges, "--seed", seed) == 0
        assert len(orders_of(tmp_path)) == 3, "with all ranges given nothing has to be asked"
        texts.append((tmp_path / "profile.json").read_text())
    assert texts[0] == texts[1] != texts[2]


def test_a_probe_that_fails_is_shown_and_the_others_are_kept(profile, tmp_path, capsys):
    failing = "if number == 4:\n    print('out of memory', file=sys.stderr)\n    sys.exit(3)"
    assert profile("--probes", "3", at_probe=failing) == 1
    told = capsys.readouterr().err
    assert "ended with exit code 3" in told
    assert "script.py\nout of memory\n" in told
    assert f"The probes that ended are in {tmp_path / 'profile.json.partial'}" in told
    assert not (tmp_path / "profile.json").exists()
    assert len(ConvergenceProfile.load(tmp_path / "profile.json.partial").points) == 1


def test_a_probe_that_hangs_is_ended_with_its_workers(profile, tmp_path, capsys):
    hanging = (
        "import subprocess\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(os.path.join(here, 'worker'), 'w').write(str(worker.pid))\n"
        "time.sleep(600)"
    )
    begin = time.monotonic()
    assert profile("--timeout", "1", at_probe=hanging) == 1
    assert time.monotonic() - begin < 60
    assert "was not done within 1 s; raise --timeout" in capsys.readouterr().err
    assert not psutil.pid_exists(int((tmp_path / "worker").read_text()))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--probes", "0"], "argument --probes: 0 is out of range; give an integer >= 1"),
        (["--min-total", "few"], "argument --min-total: few is out of range"),
        (["--timeout", "-1"], "argument --timeout: -1 is out of range; give seconds above 0"),
        (["no-script.py"], "script=no-script.py is no file"),
        (["--output", "/nowhere/profile.json"], "--output /nowhere/profile.json: the folder /nowhere does not exist"),
        (["--speed", "3"], "unknown option --speed. Did you mean --seed?"),
    ],
)
def test_bad_options_are_named_before_anything_starts(profile, tmp_path, capsys, options, says):
    with pytest.raises(SystemExit) as stopped:
        profile(*options)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "orders").exists()

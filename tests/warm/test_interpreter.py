"""A program behaves as if Python had started it, and finds imported what it would else import for seconds."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.warm.interpreter import warm_python, warmed

pytestmark = [
    pytest.mark.skipif(warm_python() == sys.executable, reason="needs Linux"),
    pytest.mark.slow("a tool of other tests, which fail without it"),
]

TELL = """
import json, os, sys
ours = [name for name in sys.modules if name.startswith("lightning_hetero")]
print(json.dumps({"argv": sys.argv, "path": sys.path, "folder": os.getcwd(), "variable": os.environ.get("TESTED"),
    "ours": ours, "entered": "_lightning_hetero_autoload" in sys.modules, "python": sys.executable,
    "torch": "torch._dynamo" in sys.modules, "lightning": "lightning" in sys.modules, "name": __name__,
    "read": sys.stdin.read()}))
"""


def run(*arguments, **kwargs):
    return subprocess.run([warm_python(), *arguments], capture_output=True, text=True, timeout=60, **kwargs)


def told(*arguments, **kwargs):
    done = run(*arguments, **kwargs)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_program_has_its_own_arguments_folder_environment_and_input(tmp_path):
    (tmp_path / "script.py").write_text(TELL)
    (tmp_path / "inner").mkdir()
    environment = {**os.environ, "PYTHONPATH": "/somewhere", "TESTED": "é"}
    script, module, code = (
        told(*start, "a", "-u", cwd=tmp_path / folder, env=environment, input="typed")
        for start, folder in (([str(tmp_path / "script.py")], "inner"), (["-m", "script"], ""), (["-c", TELL], "inner"))
    )
    for found in (script, module, code):
        assert (found["argv"][1:], found["variable"], found["name"]) == (["a", "-u"], "é", "__main__")
        assert (found["read"], found["python"]) == ("typed", warm_python())
        assert found["path"][1] == "/somewhere"
    assert (script["argv"][0], script["path"][0]) == (str(tmp_path / "script.py"), str(tmp_path))
    assert (module["argv"][0], module["path"][0]) == (str(tmp_path / "script.py"), str(tmp_path))
    assert (code["argv"][0], code["path"][0], code["folder"]) == ("-c", "", str(tmp_path / "inner"))


def test_ours_is_entered_with_the_environment_of_the_program():
    for autoload in ("0", "1"):
        found = told("-c", TELL, env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}, input="")
        assert (found["torch"], found["lightning"], found["ours"]) == (True, False, [])
        assert found["entered"] == (autoload == "1")


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(lambda: sys.stderr.write('last'))", 0, "last"),
        ("import sys, threading; threading.Timer(0.2, lambda: sys.stderr.write('late')).start()", 0, "late"),
    ],
)
def test_it_ends_as_the_program_does(code, status, error):
    done = run("-c", code)
    assert done.returncode == status
    assert error in done.stderr
    assert bool(done.stderr) == bool(error)


WAIT = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
try:
    print(os.getpid(), flush=True)
    time.sleep(60)
except KeyboardInterrupt: os._exit(5)
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 5), (signal.SIGKILL, -9)]
)
def test_a_signal_reaches_the_program(number, status):
    with subprocess.Popen([warm_python(), "-u", "-c", WAIT], stdout=subprocess.PIPE, text=True) as process:
        program = psutil.Process(int(process.stdout.readline()))
        process.send_signal(number)
        assert process.wait(30) == status
        deadline = time.monotonic() + 30
        while program.is_running() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not program.is_running()


def test_other_options_get_a_python_from_nothing():
    done = run("-S", "-c", "import sys; print('torch' in sys.modules, sys.executable)")
    assert done.stdout.split() == ["False", sys.executable]


def test_commands_that_are_warmed():
    assert warmed(sys.executable, "script.py", 3) == [warm_python(), "script.py", "3"]
    assert warmed("/bin/torchrun", "--help") == [warm_python(), "/bin/torchrun", "--help"]

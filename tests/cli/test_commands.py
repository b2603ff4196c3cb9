"""The command line as a whole: help, typos, short errors, ``python -m``, completion, and what it does not import."""

import io
import os
import re
import subprocess
import sys

import pytest

from lightning_hetero import __version__, cli
from lightning_hetero.cli import COMMANDS
from lightning_hetero.cli._parser import Command, UserError, build_parser, joined_negatives


def refused(capsys, *arguments):
    """What is written to the terminal for arguments that are wrong."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    written = capsys.readouterr()
    assert not written.out
    return written.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["lunch"], "error: unknown command 'lunch'. Did you mean launch? Commands are compare, completion, config, "),
        (["--verison"], "error: unknown option --verison. Did you mean --version?"),
        (["plan", "--workloda", "x"], "plan: error: unknown option --workloda. Did you mean --workload?"),
        (["plan", "B", "--toal-batch=64"], "plan: error: unknown option --toal-batch. Did you mean --total-batch?"),
        (["plan", "B", "--tot", "64"], "plan: error: unknown option --tot. Did you mean --total-batch?"),
        (["plan", "B", "--l", "1"], "unknown option --l. Did you mean --latency or --link or --list?"),
        (["plan", "B", "--price", "A100=abc"], "plan: error: --price A100=abc: 'abc' is not a number"),
        (["plan", "2xA1000"], "plan: error: device 'A1000' is unknown. Did you mean A100"),
        (["compare", "A", "B", "--max-regression", "-5%"], "argument --max-regression: '-5%' is no share; give a"),
        (["plan", "B", "C"], "plan: error: unexpected argument 'C'."),
        (["plan", "--link", "-1Gbit"], "plan: error: argument --link: '-1Gbit' is negative; give a rate from"),
        (["simulate", "B", "--polcy", "pid"], "simulate: error: unknown option --polcy. Did you mean --policy?"),
        (["profile", "--outptu", "x.json", "t.py"], "unknown option --outptu. Did you mean --output?"),
        (["profile"], "profile: error: the following arguments are required: script"),
        (["profile-convergence", "nowhere.py"], "error: script=nowhere.py is no file; give the script that trains"),
        (["launch", "--hetero_polcy", "pid", "t.py"], "unknown option --hetero_polcy. Did you mean --hetero_policy"),
        (["launch", "--hetero_polic", "pid", "t.py"], "unknown option --hetero_polic. Did you mean --hetero_policy"),
        (["profile", "--q"], "profile: error: unknown option --q."),
        (["compare", "run 1"], "compare: error: the following arguments are required: B"),
        (["report", "a b", "c d", "b"], "report: error: unexpected argument 'c d'."),
        (["report", "", ""], "report: error: unexpected argument ''."),
        (["doctor", "--second", "0"], "doctor: error: unknown option --second. Did you mean --seconds?"),
        (["doctor", "--seconds", "0"], "doctor: error: argument --seconds: '0' is out of range; give a number from"),
        (["doctor", "--precision", "int8"], "doctor: error: argument --precision: invalid choice: 'int8'"),
        (["completion", "powershell"], "completion: error: argument shell: invalid choice: 'powershell'"),
    ],
    ids=" ".join,
)
def test_an_error_is_short_and_has_the_nearest_name(arguments, told, capsys):
    text = refused(capsys, *arguments)
    assert told in text
    usage, error, hint = text.splitlines()
    program = " ".join(["lightning-hetero", *(arguments[:1] if arguments[0] in COMMANDS else [])])
    assert usage.startswith(f"usage: {program} ")
    assert error.startswith(f"{program}: error: ")
    assert hint == f"Options: {program} --help"


def test_help_lists_the_commands_and_help_of_each_its_options(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n    {name}" in text for name in COMMANDS)
    assert text.count("--help") == 2, "the option, and how to see the options of a command"
    assert cli.main([]) == 2
    assert capsys.readouterr().out == text
    assert cli.main(["-h"]) == 0
    assert capsys.readouterr().out == text
    assert cli.main(["-V"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    for name in COMMANDS.keys() - {"launch"}:
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: lightning-hetero {name} {COMMANDS[name].usage}\n")
        assert not re.search(r"\(type: |default: null", text), "what jsonargparse adds"


def test_a_command_is_one_line_and_a_module(monkeypatch, capsys):
    errors = {
        "nobody": UserError("--to nobody: name somebody."),
        "file": FileNotFoundError(2, "No such file or directory", "letter.txt"),
        "stop": KeyboardInterrupt(),
        "absent": ModuleNotFoundError("No module named 'plotly'", name="plotly"),
        "unknown": ModuleNotFoundError("nothing to import"),
        "network": OSError("Network is unreachable"),
    }

    class Module:
        @staticmethod
        def add_options(parser):
            parser.add_argument("--to", default="you")

        @staticmethod
        def run(options):
            if options.to in errors:
                raise errors[options.to]
            sys.stdout.write(f"hello {options.to}\n")
            return 3

    monkeypatch.setattr(Command, "load", lambda self: Module)
    monkeypatch.setitem(COMMANDS, "greet", Command("greet", "[options]", "greet somebody", "report"))
    assert cli.main(["greet", "--to", "me"]) == 3
    assert capsys.readouterr().out == "hello me\n"
    assert "lightning-hetero greet: error: --to nobody: name somebody." in refused(capsys, "greet", "--to", "nobody")
    for to, code, told in (
        ("file", 1, "letter.txt: No such file or directory. Give a file that can be read or written."),
        ("stop", 130, "interrupted"),
        ("absent", 2, "No module named 'plotly'. Install it with: pip install 'lightning-hetero[report]'"),
    ):
        assert cli.main(["greet", "--to", to]) == code
        assert f"lightning-hetero greet: {told}" in capsys.readouterr().err
    monkeypatch.setitem(COMMANDS, "greet", Command("greet", "[options]", "greet somebody"))
    assert cli.main(["greet", "--to", "absent"]) == 2
    assert "pip install 'plotly'" in capsys.readouterr().err, "a package of no extra"
    for to, error in (("unknown", ModuleNotFoundError), ("network", OSError)):
        with pytest.raises(error):
            cli.main(["greet", "--to", to])


@pytest.mark.parametrize(
    ("arguments", "joined"),
    [
        (["--link", "-.5Gbit"], ["--link=-.5Gbit"]),
        (["--link", "-inf"], ["--link=-inf"]),
        (["--link", "--json"], ["--link", "--json"]),
        (["--link=1", "-1"], ["--link=1", "-1"]),
        (["-o", "-1"], ["-o", "-1"]),
        (["-1"], ["-1"]),
    ],
)
def test_a_negative_number_belongs_to_the_option_before_it(arguments, joined):
    assert joined_negatives(arguments) == joined


@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "--tpu --tpu_cluster train.py --no_tpu_cluster",
        "--tpu --no_tpu_cluster train.py",
        "--num-processes 3 --mixed_precision bf16 --cpu -m train --num_processes 4 -- -1",
        "--dynamo_backend inductor --gpu_ids 0,1 --rdzv_conf timeout=5 train.py --cpu",
        "--use_fsdp --fsdp_offload_params true --main_process_port 29501 train.py",
    ],
)
def test_launch_reads_the_options_of_accelerate_as_it_does(line):
    accelerate = pytest.importorskip("accelerate.commands.launch")
    expected = vars(accelerate.launch_command_parser().parse_args(line.split()))
    parser, _ = build_parser(COMMANDS, ("launch",))
    found = vars(parser.parse_args(["launch", *line.split()])["launch"])
    assert {name: value for name, value in found.items() if not name.startswith("hetero_")} == expected


@pytest.mark.parametrize(
    ("line", "code", "errors"),
    [
        ("--help >&-", 0, ""),
        ("plan --list >&-", 0, ""),
        ("--help | true", 0, ""),
        ("config <&- >/dev/null", 2, "lightning-hetero config: the answers ended early; nothing was written.\n"),
        ("config <&- >/dev/null 2>&-", 2, ""),
    ],
)
def test_streams_may_be_closed(line, code, errors, tmp_path):
    command = f"{sys.executable} -m lightning_hetero {line}"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment
    )
    assert (done.returncode, done.stderr) == (code, errors)


def test_options_come_from_the_command_line_only(monkeypatch):
    """A user's own LightningCLI may read the environment by this variable of jsonargparse."""
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    monkeypatch.setenv("LIGHTNING_HETERO_SIMULATE__STEPS", "7")
    monkeypatch.setenv("LIGHTNING_HETERO_SIMULATE__LINK", "-1Gbit")
    parser, _ = build_parser(COMMANDS, ("simulate",))
    options = parser.parse_args(["simulate", "B"])["simulate"]
    assert (options.cluster, options.steps, options.link) == ("B", 200, None)


PROGRAM = """
import contextlib, io, sys
from lightning_hetero.cli import COMMANDS, main
helps = [[name, "--help"] for name in COMMANDS if name != "launch"]
for arguments in ([], ["--help"], ["--version"], ["lunch"], *helps):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(arguments)
print([name for name in ("torch", "lightning", "accelerate", "scipy", "shtab") if name in sys.modules])
"""


def test_help_and_typos_load_nothing_heavy():
    """In one fresh process: ``--help`` of every command but ``launch``, which lists Accelerate's options."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "lightning_hetero", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{__version__}\n"


@pytest.fixture(scope="module")
def bash():
    """The words that bash offers after others, by the script that the command writes."""
    pytest.importorskip("shtab")
    written, sys.stdout = sys.stdout, io.StringIO()
    try:
        assert cli.main(["completion", "bash"]) == 0
        script = sys.stdout.getvalue()
    finally:
        sys.stdout = written

    def _offered(*words):
        typed = " ".join(f"'{word}'" for word in ("lightning-hetero", *words))
        line = f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _shtab_lightning_hetero; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(
            ["bash", "-c", f"{script}\n{line}"], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.split()

    return _offered


def test_bash_completes_commands_options_and_files(bash, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert bash("pro") == ["profile", "profile-convergence"]
    assert bash("plan", "--wor") == ["--workload"]
    assert bash("doctor", "--se") == ["--seconds"]
    assert "--hetero_policy" in bash("launch", "--hetero_p")
    assert "--num_processes" in bash("launch", "--num_p")
    assert bash("profile", "tr") == ["train.py"]
    for words in (("report",), ("report", "run", "--png"), ("report", "run", "--trace"), ("compare",)):
        assert bash(*words, "tr") == ["train.py"], words

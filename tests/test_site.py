"""The README stands alone, and the site's gallery, commands, folds and links are in order."""

import ast
import re
import runpy
import shlex
from functools import cache

import pytest
from torch.distributed.run import get_args_parser

from lightning_hetero.cli import main
from tests.test_docs import FENCE, LINK, PICTURES_TO_COME, README, ROOT, TEXTS, anchor, every_page, prose

CONF = (ROOT / "docs" / "conf.py").read_text()
GALLERY = sorted((ROOT / "docs" / "gallery").glob("plot_*.py"))

ABSOLUTE = re.compile(
    r"https://(?:github\.com|raw\.githubusercontent\.com)/lightning-hetero/lightning-hetero/(?:blob/)?main/([^\s)#]+)"
    r"(?:#([\w-]+))?"
)
FOLD = re.compile(r'<details class="tests">\n<summary>Tests behind this page</summary>\n\n(.*?)\n\n</details>\n', re.S)


@every_page
def test_relative_links_lead_somewhere(page):
    for target in LINK.findall(prose(page)):
        if re.match(r"https?://", target):
            continue
        name, _, heading = target.partition("#")
        built = re.fullmatch(r"examples/(plot_\w+)\.rst", name)  # a page of the gallery, made of a script
        name = f"gallery/{built[1]}.py" if built else name
        path = (page.parent / name).resolve() if name else page
        inside = path.relative_to(ROOT).as_posix()
        assert path.is_file() or inside in PICTURES_TO_COME, f"{target} leads to no file"
        assert page.parent == ROOT or path.is_relative_to(ROOT / "docs"), f"{target} is outside what Sphinx builds"
        if heading:
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
            assert heading in map(anchor, headings), f"{target} leads to no heading"


@every_page
def test_links_to_our_own_repository_lead_somewhere(page):
    for name, heading in ABSOLUTE.findall(TEXTS[page]):
        assert (ROOT / name).is_file() or name in PICTURES_TO_COME, f"{name} is not in the repository"
        if heading:
            headings = re.findall(r"^#+ (.+)$", (ROOT / name).read_text(), re.M)
            assert heading in map(anchor, headings), f"{name}#{heading} leads to no heading"


def test_links_of_the_readme_work_where_only_the_readme_is_shown():
    """PyPI shows it alone, so that a relative link would lead nowhere."""
    targets = [*LINK.findall(prose(ROOT / "README.md")), *re.findall(r"^\[[\w-]+\]: (\S+)$", README, re.M)]
    assert len(ABSOLUTE.findall(README)) > 10
    assert not [target for target in targets if not target.startswith("https://")]


def test_references_of_the_readme_are_defined():
    defined = set(re.findall(r"^\[([\w-]+)\]: ", README, re.M))
    used = set(re.findall(r"\[([\w-]+)\](?![:(\[])", re.sub(r"`[^`]*`", "", prose(ROOT / "README.md"))))
    assert {name.lower() for name in used} == defined


def test_the_readme_is_short():
    text = re.sub(r"^\[[\w-]+\]: [^\n]*$|^```.*?^```$", "", README, flags=re.M | re.S)
    assert len(text.split()) <= 800, "tables and long texts belong on the pages"


def test_abbreviations_do_not_cut_descriptions_in_the_reference():
    """Sphinx shows the first sentence, which ends neither before the 7 of "C eq. 7" nor before that of "sec. 7"."""
    abbreviations = ast.literal_eval(re.search(r"^ABBREVIATIONS = (\(.*?\))$", CONF, re.M)[1])
    found = {
        word
        for path in (ROOT / "lightning_hetero").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
        for word in re.findall(r"\b(\w+\.)\s+[A-Z]?-?\d", (ast.get_docstring(node) or "").split("\n\n")[0])
    }
    assert {"eq.", "sec."} <= found <= set(abbreviations)


@cache
def names_of_tests():
    sources = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.M)}


@every_page
def test_tests_are_named_in_the_fold_at_the_end(page):
    if page.stem in {"equations", "evidence", "modules", "reliability"}:  # which are tables of such things
        return
    text = prose(page)
    folds = FOLD.findall(text)
    assert len(folds) <= 1
    assert not folds or text.endswith("</details>\n")
    said = FOLD.sub("", text)
    assert not re.findall(r"`tests/[\w./]*`", said)
    assert not set(re.findall(r"`(test_\w+)`", said)) & names_of_tests()


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_scripts_of_the_gallery_run(path, capsys, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    runpy.run_path(str(path))
    drawn = plt.get_fignums()
    plt.close("all")
    assert drawn
    assert capsys.readouterr().out


def test_the_script_of_the_quickstart_is_the_example():
    source = (ROOT / "examples" / "quickstart.py").read_text()
    script = next(match[2] for match in FENCE.finditer(TEXTS[ROOT / "docs" / "quickstart.md"]) if match[1] == "python")
    assert source.endswith(script)
    assert script.startswith("import ")


def test_the_page_on_mixed_gpus_shows_what_the_command_writes(capsys):
    text = TEXTS[ROOT / "docs" / "mixed-gpus.md"]
    command, shown = re.search(r"^```console\n\$ lightning-hetero (.+)\n((?s:.*?))^```$", text, re.M).groups()
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown


def test_torchrun_understands_the_commands_of_all_pages():
    blocks = (match[2] for text in TEXTS.values() for match in FENCE.finditer(text) if match[1] in ("bash", "console"))
    joined = "\n".join(blocks).replace("\\\n", " ")
    commands = re.findall(r"^(?:\$ )?(?:\w+=\w+ |\w+=[\d,]+ )*torchrun (.+?)(?: &| \.\.\.)?$", joined, re.M)
    assert len(commands) >= 8
    for command in commands:
        arguments = get_args_parser().parse_args(shlex.split(command))
        assert arguments.training_script.endswith(".py") or arguments.module, command


def test_search_finds_what_users_look_for():
    titles = {text.partition("\n")[0].lower() for text in TEXTS.values()}
    assert {"# out of memory", "# mixed gpus at home", "# two machines over ethernet"} <= titles


@every_page
def test_no_line_is_taken_for_a_comment(page):
    """To MyST, a line that begins with a per cent sign is a comment, so that a wrapped "3 %" loses what follows."""
    assert not re.findall(r"^\s*%.*$", prose(page), re.M)

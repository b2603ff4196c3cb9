"""The source distribution is complete, the wheel has what it needs and no more, and works without extras."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import distributions

# Imports torch where the package was taken away, but its metadata, with the entry point, was not.
IMPORT_TORCH = "import sys, torch; print(torch.ones(2).sum().item(), 'lightning_hetero' in sys.modules)"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution, and the wheel that was built from it."""
    return distributions.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def metadata(built):
    with zipfile.ZipFile(built[1]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        return archive.read(name).decode()


def test_the_source_distribution_has_all_sources(built):
    """Tests with what they read, docs with their figures, examples, benchmarks with their results."""
    found = distributions.in_sdist(built[0])
    assert found == distributions.sources()
    folders = ("tests", "docs/figures", "examples", "benchmarks/results", "lightning_hetero", ".github", ".ci")
    assert all(any(name.startswith(f"{folder}/") for name in found) for folder in folders)


def test_the_wheel_has_the_package_and_nothing_else(built):
    assert distributions.in_wheel(built[1]) == distributions.expected_in_wheel()


def test_the_text_for_pypi_has_no_relative_links(metadata):
    text = metadata.partition("\n\n")[2]
    targets = re.findall(r"\]\(([^)\s]+)", text) + re.findall(r"^\[[^]]+\]: (\S+)$", text, re.M)
    targets += re.findall(r"""(?:src|srcset|href)=["']([^"']+)""", text)
    assert len(targets) > 10
    assert not [target for target in targets if not re.match(r"https://|#", target)]
    ours = "https://(?:raw.githubusercontent|github).com/lightning-hetero/lightning-hetero/(?:blob/)?(?:main|v[\\d.]+)/([^#]+)"
    files = {match[1] for match in map(re.compile(ours).match, targets) if match}
    assert files
    assert not [name for name in files if not (distributions.ROOT / name).is_file()]


def test_the_wheel_says_who_made_it_and_where_things_are(metadata):
    assert re.search(r"^Author: The lightning-hetero authors$", metadata, re.M)
    assert re.search(r"^Description-Content-Type: text/markdown", metadata, re.M)
    urls = dict(re.findall(r"^Project-URL: (\w+), (https://\S+)$", metadata, re.M))
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert not re.search(r"^Requires-Dist: (?:scipy|pandas)[^;]*$", metadata, re.M), "only in extras"


def test_the_wheel_works_without_extras_and_breaks_no_import_of_torch(built, tmp_path):
    assert "scipy" not in distributions.requirements(built[1])
    packages = distributions.check_wheel(Path(os.path.relpath(built[1])), tmp_path)
    assert not (packages / "scipy").exists()
    shutil.rmtree(packages / "lightning_hetero")
    (packages / "_lightning_hetero_autoload.py").unlink()
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    command = [str(tmp_path / "bin" / "python"), "-c", IMPORT_TORCH]
    done = subprocess.run(command, cwd=tmp_path, env=env, timeout=120, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2.0", "False"], done.stderr
    assert "pip uninstall lightning-hetero" in done.stderr


def test_an_unpacked_source_distribution_knows_its_sources(built, tmp_path):
    subprocess.run(["tar", "-xzf", str(built[0]), "-C", str(tmp_path)], check=True, timeout=60)
    (root,) = tmp_path.iterdir()
    assert distributions.sources(root) == distributions.sources()


def test_what_fails_is_shown(tmp_path):
    code = "import sys; print('this', flush=True); sys.stderr.write('and that'); sys.exit(3)"
    with pytest.raises(RuntimeError, match=r"ended with 3:\nthis\nand that"):
        distributions.ran([sys.executable, "-c", code], Path(tmp_path))

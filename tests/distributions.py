"""Build the source distribution and the wheel, and try the wheel in an environment without extras; needs no network.

    python tests/distributions.py FOLDER

The wheel is built from the unpacked source distribution, so that this one must be complete. The environment has links
to the installed packages that the wheel requires, and to no others.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
NAME = "lightning_hetero"
REPORT = {"report/page.html", "report/style.css", "report/theme.js"}
DATA = {"py.typed", "simulate/devices/published.json", *REPORT}
MADE = re.compile(r"PKG-INFO|setup\.cfg|lightning_hetero\.egg-info/.*")
"""Files of a source distribution that setuptools writes."""

BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"

# What a user does first. Prints what of other packages was imported that nobody asked for.
TRY = """
import sys
import torch
import lightning_hetero
assert {"scipy", "pandas", "matplotlib", "lightning"}.isdisjoint(sys.modules), "import torch stays small"
from lightning import Trainer
from lightning.fabric import Fabric
trainer = Trainer(strategy="hetero_ddp", accelerator="cpu", devices=2, logger=False)
assert isinstance(trainer.strategy, lightning_hetero.HeteroDDPStrategy)
assert "lightning_hetero" in type(Fabric(strategy="hetero_ddp", accelerator="cpu", devices=2).strategy).__module__
for name in lightning_hetero.__all__:
    assert getattr(lightning_hetero, name) is not None
from lightning_hetero import core, simulate
for package in (core, simulate):
    for name in package.__all__:
        getattr(package, name)
assert lightning_hetero.__file__.startswith(sys.prefix), lightning_hetero.__file__
others = {"scipy", "pandas", "matplotlib", "accelerate", "transformers"}
print(lightning_hetero.__version__, *sorted(others & set(sys.modules)))
"""


def ran(command, cwd, **options):
    """What a command writes to its standard output."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280, check=False, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def sources(root=ROOT):
    """Files of a checkout without those that git ignores, or of an unpacked source distribution."""
    if (root / ".git").exists():
        listed = ran(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], root).split("\0")
    else:
        listed = (root / f"{NAME}.egg-info" / "SOURCES.txt").read_text().splitlines()
    return sorted(name for name in listed if (root / name).is_file() and not MADE.fullmatch(name))


def build(folder, root=ROOT):
    """Build both distributions into a folder, from a copy of the sources.

    Returns:
        Paths of the source distribution and of the wheel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob(f"{NAME}-*.whl"), *folder.glob(f"{NAME}-*.tar.gz")):
        old.unlink()
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "copy"
        for source in sources(root):
            (copy / source).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / source, copy / source)
        build = [sys.executable, "-c", BUILD]
        sdist = folder / ran([*build, "build_sdist", str(folder.resolve())], copy).split()[-1]
        with tarfile.open(sdist) as archive:
            archive.extractall(name, filter="data")
        unpacked = Path(name) / sdist.name.removesuffix(".tar.gz")
        wheel = folder / ran([*build, "build_wheel", str(folder.resolve())], unpacked).split()[-1]
    return sdist, wheel


def in_sdist(sdist):
    """Files of a source distribution that are sources."""
    with tarfile.open(sdist) as archive:
        names = (member.name.partition("/")[2] for member in archive.getmembers() if member.isfile())
        return sorted(name for name in names if not MADE.fullmatch(name))


def in_wheel(wheel):
    """Files of a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if ".dist-info/" not in name)


def expected_in_wheel(root=ROOT):
    """The modules of the package, its data, and the modules of the entry point."""
    package = root / NAME
    modules = (path.relative_to(root).as_posix() for path in package.rglob("*.py"))
    return sorted([*modules, *(f"{NAME}/{name}" for name in DATA), *(path.name for path in root.glob(f"_{NAME}_*.py"))])


def requirements(wheel):
    """Distributions that a wheel without extras requires, directly or through others."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    found, waiting = set(), [Requirement(line) for line in re.findall(r"^Requires-Dist: (.+)$", text, re.M)]
    while waiting:
        wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        extras = ("", *wanted.extras)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        if (name, extras) in found:
            continue
        found.add((name, extras))
        for line in metadata.requires(name) or ():
            inner = Requirement(line)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                inner.marker = None
                waiting.append(inner)
    return sorted({name for name, _ in found})


def environment(wheel, folder):
    """Make a virtual environment with a wheel, installed by pip, and links to what the wheel requires.

    Returns:
        Its folder of packages.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "-q"]
    ran([*install, "--disable-pip-version-check", str(wheel.resolve())], folder)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    for name in requirements(wheel):
        for file in metadata.files(name) or ():
            top = file.parts[0]
            source, link = Path(metadata.distribution(name).locate_file(top)), packages / top
            if top not in ("..", "__pycache__") and source.exists() and not link.exists():
                link.symlink_to(source)
    return packages


def check_wheel(wheel, folder):
    """Install a wheel and use it: imports, commands, a trainer's strategy.

    Returns:
        The environment's folder of packages.

    Raises:
        RuntimeError: if something of it fails.
    """
    packages = environment(wheel, folder)
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    version, *imported = ran([str(folder / "bin" / "python"), "-c", TRY], folder, env=clean).split()
    if imported or f"-{version}-" not in wheel.name:
        raise RuntimeError(f"{wheel.name} has version {version}, and imports {imported}")
    shown = ran([str(folder / "bin" / "lightning-hetero"), "--help"], folder, env=clean)
    if "launch" not in shown:
        raise RuntimeError(f"lightning-hetero --help shows:\n{shown}")
    return packages


def main(folder):
    """Build and check both distributions; say what was built."""
    sdist, wheel = build(folder)
    missing = set(sources()) ^ set(in_sdist(sdist))
    other = set(in_wheel(wheel)) ^ set(expected_in_wheel())
    if missing or other:
        raise SystemExit(f"{sdist.name} and the checkout differ in {sorted(missing)}, {wheel.name} in {sorted(other)}")
    with tempfile.TemporaryDirectory() as name:
        check_wheel(wheel, Path(name) / "environment")
    print(f"{sdist} ({sdist.stat().st_size // 1000} kB), {wheel} ({wheel.stat().st_size // 1000} kB): checked")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

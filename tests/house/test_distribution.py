"""What is published: the wheel and the sdist, their metadata, and the workflow that checks them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from hashlib import sha256
from pathlib import Path

import pytest

import thinwire
from thinwire.lab.missing import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from it."""
    for package in ("build", "hatchling", "twine"):
        pytest.importorskip(package, reason="needs the extra dist: pip install -e '.[dist]'")
    folder = tmp_path_factory.mktemp("dist")
    _build(ROOT, folder)
    return folder


def _build(source: Path, folder: Path, *options: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), *options, str(source)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def _contents(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as file:
        return {name: sha256(file.read(name)).hexdigest() for name in file.namelist()}


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(file.read(name).decode())


@pytest.mark.slow
def test_pypi_would_take_both(dist: Path) -> None:
    files = sorted(map(str, dist.iterdir()))
    assert len(files) == 2
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"NO_COLOR": "1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("PASSED") == 2


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = {name for name in _contents(wheel) if ".dist-info/" not in name}
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode == 0:
        there = {name for name in listed.stdout.split() if (ROOT / name).exists()}
        assert names == {name.removeprefix("src/") for name in there}
    assert "thinwire/py.typed" in names
    assert {name for name in names if not name.startswith("thinwire/")} == {"_thinwire_backend.py"}
    assert not [name for name in names if "test_" in name or name.endswith((".pyc", ".nbi", ".nbc"))]


@pytest.mark.slow
def test_the_sdist_builds_the_wheel_of_the_sources(dist: Path, tmp_path: Path) -> None:
    (from_sdist,) = dist.glob("*.whl")
    _build(ROOT, tmp_path, "--wheel")
    (from_sources,) = tmp_path.glob("*.whl")
    assert _contents(from_sdist) == _contents(from_sources)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"tests/house/test_distribution.py", "Makefile", "constraints.txt", "LICENSE", "SECURITY.md"} <= names
    assert not [name for name in names if name.startswith((".venv", ".git/", "site/", "dist/"))]


@pytest.mark.slow
def test_metadata(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    metadata = _metadata(wheel)
    assert metadata["Version"] == thinwire.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"all", "cpu", "plot", "testbed", "train"} <= set(metadata.get_all("Provides-Extra") or [])


def test_one_version_and_one_address() -> None:
    """The address of the repository is written in pyproject.toml; other files agree with it."""
    assert PROJECT["version"] == thinwire.__version__
    assert set(PROJECT["urls"]) == {"Homepage", "Documentation", "Issues", "Changelog"}
    home = PROJECT["urls"]["Homepage"]
    assert all(url.startswith(home) for url in PROJECT["urls"].values())
    texts = [ROOT / "README.md", ROOT / "mkdocs.yml", *ROOT.glob(".github/**/*.yml")]
    for path in texts:
        assert set(re.findall(r"https://github.com/[\w-]*thinwire[\w-]*/[\w-]+", path.read_text())) <= {home}, path


def test_the_workflow_runs_verbs_of_the_makefile_on_the_versions_that_are_declared() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    verbs = set(re.findall(r"run: make ([\w-]+)", workflow))
    assert verbs == {"test", "test-slow", "test-integrations", "docs", "dist"}
    assert verbs <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    declared = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", line)]
    (matrix,) = re.findall(r"python: \[(.*)\]", workflow)
    assert re.findall(r"[\d.]+", matrix) == declared
    assert PROJECT["requires-python"] == f">={declared[0]}"


def test_the_extra_all_has_every_extra_of_users() -> None:
    extras = PROJECT["optional-dependencies"]
    users = sorted(set(extras) - {"all", "dev", "dist", "docs", "integrations", "test"})
    assert extras["all"] == [f"thinwire[{','.join(users)}]"]
    assert users == sorted(set(EXTRAS.values()))

"""Files and modules of users are looked at, and never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.lab.sources import parsed, spec_of

RUNS = "raise SystemExit('it was run')\n"


def test_a_file_is_parsed_and_its_error_has_the_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RUNS)
    assert len(parsed(script).body) == 1
    script.write_text("x = 1\ndef train(:\n")
    with pytest.raises(ValueError, match=r"train\.py, line 2: "):
        parsed(script)


def test_modules_are_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "of_a_user" / "inner"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py", package / "job.py"):
        file.write_text(RUNS)
    monkeypatch.chdir(tmp_path)
    spec = spec_of("of_a_user.inner.job", "of_a_user.inner.job:make")
    assert spec is not None
    assert spec.origin == str(package / "job.py")
    assert spec_of("os.path", "os.path:join") is None, "only its parent knows it"
    with pytest.raises(ValueError, match=r"cannot import of_a_user\.jobs:make: No module named 'of_a_user\.jobs'"):
        spec_of("of_a_user.jobs", "of_a_user.jobs:make")
    with pytest.raises(ValueError, match="run from the directory that holds it"):
        spec_of("no_module_of_anyone.job", "no_module_of_anyone.job")

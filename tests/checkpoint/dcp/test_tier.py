"""The directory of checkpoints on a disk."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from holders import SECRET
from tests.checkpoint.common.restored import keeper, on_disk
from thinwire.checkpoint.dcp.tier import write_about
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.errors import ThinwireError

pytestmark = pytest.mark.ranks


@pytest.mark.usefixtures("alone")
def test_the_directory_is_made_and_its_parent_is_not(socket: str, tmp_path: Path) -> None:
    """What is not mounted looks like that, before the job begins or in the middle of it."""
    mount = tmp_path / "mount"
    with pytest.raises(ValueError, match=rf"no directory {mount} on .*: mount its file system, or make it"):
        keeper(socket, mount / "run")
    mount.mkdir()
    with keeper(socket, mount / "run") as checkpointer:
        checkpointer.restore()
        checkpointer.step()
        checkpointer.persist_now()
        mount.rename(tmp_path / "away")
        mount.mkdir()
        with pytest.raises(ThinwireError, match=r"no checkpoint was saved to .*ENOENT"):
            checkpointer.persist_now()
        assert list(mount.iterdir()) == []
        mount.rmdir()
        (tmp_path / "away").rename(mount)
        checkpointer.persist_now()


@pytest.mark.usefixtures("alone")
def test_a_directory_of_another_run_is_neither_read_nor_written(socket: str, tmp_path: Path) -> None:
    """Its weights were restored, a fresh start gave them up, and each save removed or replaced some of them."""
    directory = tmp_path / "disk"
    with keeper(socket, directory) as first, keeper(socket, directory, run="other") as late:
        assert (first.restore(), late.restore()) == (None, None)
        first.step()
        first.persist_now()
        late.step()
        with pytest.raises(ThinwireError, match=r"no checkpoint was saved to .*has checkpoints of run 'run'"):
            late.persist_now()
    for fresh in (False, True):
        with keeper(socket, directory, run="new") as checkpointer, pytest.raises(ValueError, match="run_id='run'"):
            checkpointer.restore(fresh=fresh)
    with keeper(socket, directory, run="new") as checkpointer, pytest.raises(ValueError, match="run_id='run'"):
        checkpointer.step()
    assert [path.name for path in directory.glob("step-*")] == ["step-00000001"]


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_of_a_release_that_named_no_run_is_of_any(socket: str, tmp_path: Path) -> None:
    with keeper(socket, tmp_path / "disk") as checkpointer:
        checkpointer.restore()
        checkpointer.step()
        checkpointer.persist_now()
    path = tmp_path / "disk" / "step-00000001"
    about = json.loads((path / "thinwire.json").read_text())
    write_about(path, {name: value for name, value in about.items() if name not in ("run", "digest")})
    with keeper(socket, tmp_path / "disk", run="new") as checkpointer:
        assert checkpointer.restore() == 1


@pytest.mark.usefixtures("alone")
def test_persist_now_returns_when_it_is_there_or_says_why_not(socket: str, tmp_path: Path) -> None:
    """And what a killed job left half-written goes, but not what another one writes."""
    (tmp_path / "file").mkdir()
    directory = tmp_path / "file" / "disk"
    with keeper(socket, directory) as checkpointer:
        (tmp_path / "file").rmdir()
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match=r"restore\(\) or step\(\) before it"):
            checkpointer.persist_now()
        with pytest.warns(UserWarning, match="nothing can be saved to .*ENOTDIR"):
            assert checkpointer.restore() is None
        checkpointer.step()
        with pytest.raises(ThinwireError, match=r"no checkpoint was saved to .*ENOTDIR"):
            checkpointer.persist_now()
        assert checkpointer.stats()["checkpoint/persistent_errors"] == 1.0
        assert "ENOTDIR" in str(checkpointer.stats()["checkpoint/persistent_error"])
        (tmp_path / "file").unlink()
        (directory / "step-00000007.partial").mkdir(parents=True)
        with (directory / "run").open("a") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(ThinwireError, match=r"EAGAIN: .*another job writes to"):
                checkpointer.persist_now()
            assert (directory / "step-00000007.partial").exists()
        checkpointer.persist_now()
        assert [path.name for path in directory.glob("step-*")] == ["step-00000001"]
        checkpointer.step()
        checkpointer.persist_now()
        checkpointer.persist_now()  # the same step once more
        assert on_disk(directory) == [1, 2]
    with pytest.warns(UserWarning, match="gives up its steps .*2"), keeper(socket, directory) as checkpointer:
        assert checkpointer.restore(fresh=True) is None
    assert sorted(path.name for path in directory.glob("step-*")) == [f"step-0000000{n}.given-up" for n in (1, 2)]


@pytest.mark.usefixtures("alone")
def test_what_was_given_up_for_an_older_step_does_not_come_back(socket: str, tmp_path: Path) -> None:
    """Once the memory is gone too, until the next save, which may be hours away. To look at a step changes nothing."""

    def start(step: int | None = None, steps: int = 0) -> int | None:
        with HolderClient.connect(socket, SECRET.encode()) as client:
            client.forget("run")
        with keeper(socket, tmp_path / "disk") as checkpointer:
            restored = checkpointer.restore(step=step)
            for _ in range(steps):
                checkpointer.step()
                checkpointer.persist_now()
            return restored

    start(steps=2)
    assert [start(), start(step=1)] == [2, 1]
    assert on_disk(tmp_path / "disk") == [1, 2]
    with keeper(socket, tmp_path / "disk") as checkpointer:
        checkpointer.restore(step=1)
        checkpointer.step()
    assert on_disk(tmp_path / "disk") == [1]
    assert (tmp_path / "disk" / "step-00000002.given-up").is_dir()
    assert start() == 1

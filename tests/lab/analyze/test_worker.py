"""How a script runs in the process of a rank: as a module of a package too, and not if it starts ranks itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from thinwire.lab.analyze.failure import ScriptFailed
from thinwire.lab.analyze.worker import run_as_main


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_module_of_a_package_runs_with_its_relative_imports_and_arguments() -> None:
    package = Path("measured_package")
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "net.py").write_text("NAME = 'net'")
    (package / "train.py").write_text(
        "import sys, pathlib\nfrom .net import NAME\n"
        "pathlib.Path('seen').write_text(f'{__name__} {NAME} {sys.argv[1:]}')\nsys.exit(0)"
    )
    run_as_main("-m measured_package.train", ["--lr", "1"])
    assert Path("seen").read_text() == "__main__ net ['--lr', '1']"


@pytest.mark.parametrize("call", ["spawn(print, nprocs=2)", "start_processes(print, nprocs=2)"])
def test_a_script_that_starts_its_ranks_itself_is_told_what_to_do(call: str) -> None:
    Path("train.py").write_text(f"import torch.multiprocessing as mp\nmp.{call}")
    with pytest.raises(ScriptFailed, match=r"train.py starts its ranks itself.*let it read RANK and WORLD_SIZE"):
        run_as_main("train.py", [])


PROCESSES = """
import multiprocessing, sys
from torch.distributed import init_process_group

def rank(number):
    if sys.argv[1] == "ranks":
        init_process_group("gloo", init_method="tcp://127.0.0.1:1", rank=number, world_size=2)

if __name__ == "__main__":
    processes = [multiprocessing.get_context(sys.argv[2]).Process(target=rank, args=(number,)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    processes[1].close()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_become_ranks_are_refused_and_others_are_not(method: str) -> None:
    script = Path("train.py").absolute()
    script.write_text(PROCESSES)
    run_as_main(str(script), ["helpers", method])
    with pytest.raises(ScriptFailed, match=r"train.py starts its ranks itself.*let it read RANK and WORLD_SIZE"):
        run_as_main(str(script), ["ranks", method])

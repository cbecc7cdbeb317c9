"""What README and `examples/` show is run, made small: no command in the documentation may be stale."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import thinwire
from thinwire.cli.main import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SMALLER = {
    "demo": ["--link", "none", "--hosts", "2", "--steps", "2", "--report", "{directory}/report.html"],
    "analyze": ["--ranks", "2", "--steps", "2", "--report", "{directory}/report.html"],
    "bench sync": ["--link", "none", "--hosts", "2", "--repeat", "1", "--scale", "0.01"],
    "bench checkpoint": [
        "--link", "none", "--hosts", "2", "--steps", "2", "--repeat", "1", "--kills", "0", "--compute-ms", "20",
    ],
    "plan": [
        "--link", "none", "--hosts", "2", "--steps", "2", "--compress", "none", "--output", "{directory}/plan.json",
    ],
    "doctor": ["--link", "none", "--hosts", "2", "--steps", "2", "--compress", "none"],
    "bench train": ["--link", "none", "--hosts", "2", "--steps", "2", "--methods", "ddp,power_sgd"],
}  # fmt: skip
EXAMPLES = [["demo"], ["analyze"], ["holder"], ["bench", "sync"], ["bench", "train"], ["bench", "checkpoint"]]
SLOW = ("--design-space", "thinwire doctor", "thinwire plan", "bench checkpoint")


def commands(language: str) -> list[str]:
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def documented(first_word: str) -> list[str]:
    found = [line for line in commands("sh") if line.startswith(first_word + " ")]
    assert found, f"README shows no {first_word} command"
    return found


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.slow if any(word in line for word in SLOW) else ())
        for line in documented("thinwire")
    ],
)
def test_thinwire_commands(line: str, tmp_path: Path) -> None:
    arguments = shlex.split(line)[1:]
    options = next(options for name, options in SMALLER.items() if " ".join(arguments).startswith(name))
    smaller = [option.format(directory=tmp_path) for option in options]
    result = CliRunner().invoke(app, [*arguments, *smaller])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("line", documented("torchrun"))
def test_examples(line: str) -> None:
    arguments = shlex.split(line)[1:]
    arguments[arguments.index("--nproc-per-node") + 1] = "2"
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    sent, dense = (
        int(re.search(rf"{label}:\s+([\d,]+)", result.stdout)[1].replace(",", ""))
        for label in ("bytes sent per step", "a dense all-reduce")
    )
    assert sent < dense / 20
    assert "items.weight" in result.stderr, "the first step says what is synchronized how"


def test_make_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in documented("make"):
        assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE)


def test_every_name_in_python_blocks_exists() -> None:
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        compile(block, "README.md", "exec")
        for name in re.findall(r"thinwire\.(\w+)", block):
            assert hasattr(thinwire, name)
        for name in re.findall(r"sync\.(\w+)", block):
            assert hasattr(thinwire.Synchronizer, name)


@pytest.mark.parametrize("command", [[], *EXAMPLES, ["bench"]])
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    if command in EXAMPLES:
        assert "Example: thinwire" in result.output
        assert "--json" in result.output


def test_zen_in_100_lines_has_the_bits_of_the_library() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3",
         "examples/zen_in_100_lines.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("the same bits as thinwire.schemes.ZEN") == 3

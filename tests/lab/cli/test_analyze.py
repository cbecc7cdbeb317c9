"""`thinwire analyze`: its tables, what it advises and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from analyzed import FAILING
from tests.lab.cli.screens import cells_of, printed
from thinwire.lab.analyze.prediction import AssumedLink
from thinwire.lab.analyze.recording import Recording, Table
from thinwire.lab.analyze.summary import Analysis
from thinwire.lab.bench.trace import IndexTrace
from thinwire.lab.cli import analyze
from thinwire.lab.cli.analyze import app


def analysis(name: str, sparse: bool = True) -> Analysis:
    generator = torch.Generator().manual_seed(0)
    tables = (Table(name, 119_788, 128, "float32", "dense"), Table("layer.weight", 512, 128, "float32", "dense"))
    steps = tuple(tuple(torch.randint(0, 5000, (900,), generator=generator).unique() for _ in range(4)) for _ in "ab")
    traces = {name: IndexTrace(119_788, 128, steps)} if sparse else {}
    densities = {table.name: torch.ones(2, 4, dtype=torch.float64) for table in tables}
    recording = Recording(4, 1, tables, densities, traces)
    return Analysis.of(recording, "train.py", 2, AssumedLink(1000.0, 50e-6))


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 160])
def test_analyze(width: int) -> None:
    found = analysis("embeddings[0].weight")
    text = printed(lambda console: analyze._print(found, console), width)
    words = cells_of(text)
    (table,) = found.sparse
    for prediction in table.predictions:
        assert f"{prediction.union:,.0f}" in words
    assert {"119,788", f"{table.density.mean:.2%}", f"{table.densification[-1]:.2f}"} <= words
    assert "embeddings[0].weight" in text, "brackets are no markup"
    folded = "".join(words)
    assert table.predictions[-1].world_size == 1024
    assert table.predictions[-1].pick in text or table.predictions[-1].pick[:6] in folded


def test_analyze_names_stock_ddp_with_dense_and_with_sparse_tables() -> None:
    found = analysis("table.weight")
    stock, sparse, ours = found.totals
    assert [total.name for total in found.totals] == ["stock DDP", "stock DDP, sparse=True", "thinwire"]
    (table,) = found.sparse
    rest = 2 * 3 / 4 * 512 * 128 * 4
    assert stock.bytes == pytest.approx(2 * 3 / 4 * 119_788 * 128 * 4 + rest, rel=1e-5)
    held = table.density.mean * 119_788
    assert sparse.bytes == pytest.approx(3 * held * (8 + 512) + rest, rel=0.01), "ids of 8 bytes, rows to three others"
    assert ours.bytes == pytest.approx(table.here.bytes[table.here.pick] + rest)
    assert ours.seconds < stock.seconds
    text = printed(lambda console: analyze._print(found, console), 80)
    assert re.search(r"stock DDP, sparse=True +\d", text)
    assert len(found.to_json()["totals"]) == 3


def test_analyze_sends_a_dense_model_to_doctor() -> None:
    text = printed(lambda console: analyze._print(analysis("table.weight", sparse=False), console), 80)
    assert "thinwire doctor train.py" in text


DOCUMENT = Path(__file__).parents[3] / "docs" / "guides" / "analyze.md"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("line", re.findall(r"^thinwire (analyze .*)$", DOCUMENT.read_text(), re.MULTILINE))
def test_documented_commands(line: str, tmp_path: Path) -> None:
    arguments = shlex.split(line, comments=True)[1:]
    places = {name: str(tmp_path / name) for name in ("out.json", "report.html")}
    arguments = [places.get(argument, argument) for argument in arguments]
    place = next((place for place, word in enumerate(arguments) if word.endswith(".py")), len(arguments))
    smaller = [*arguments[:place], "--ranks", "2", "--steps", "2", *arguments[place:]]
    result = CliRunner().invoke(app, smaller)
    assert result.exit_code == 0, result.output
    fields = set(re.findall(r"^- `(\w+)`", DOCUMENT.read_text(), re.MULTILINE))
    figures = json.loads((tmp_path / "out.json").read_text())
    assert fields == {*figures, *figures["parameters"][0]["predictions"][0]}, "every field is documented, and no other"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "last"),
    [
        ("raise ValueError('the loss is [not] a number')", "ValueError: the loss is [not] a number"),
        ("sys.exit(3)", "train.py ended on rank 1: it called sys.exit(3). It must run under torchrun; try that first"),
        ("sys.exit('no data')", "ended on rank 1: it called sys.exit('no data'). It must run under torchrun; try that"),
        ("os._exit(4)", "train.py ended with exit status 4 on rank 1: does it call os._exit or exec?"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "train.py: rank 1 was killed by SIGKILL"),
    ],
)
def test_the_error_of_a_script_is_the_last_thing_on_the_screen(
    end: str, last: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not a traceback of ours, of the launcher or of the rank that lost its peer."""
    script = tmp_path / "train.py"
    script.write_text(FAILING.replace("{end}", end))
    result = CliRunner().invoke(app, ["--ranks", "2", "--steps", "2", str(script)])
    assert result.exit_code != 0
    shown = result.output.strip()
    assert last in shown.splitlines()[-1]
    assert "closed by peer" not in shown
    assert "runpy" not in shown
    traceback = shown[shown.find("Traceback") :].splitlines() if "raise" in end else []
    assert [line for line in traceback if "File" in line] == [
        line for line in traceback if f'File "{script}"' in line
    ], "from the script's own line on"
    written = capfd.readouterr()
    assert "Traceback" not in written.out + written.err, "nor by a rank itself"
    assert "elastic" not in written.out + written.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py"], "there is no script nothing.py"),
        (["--example", "gpt"], "unknown example 'gpt'"),
        (["--example", "lstm-lm", "train.py"], "not both"),
        (["--ranks", "1", "train.py"], "--ranks"),
        (["--steps", "0", "train.py"], "--steps"),
        (["--link", "fast"], "unknown link 'fast'"),
        (["--link", "none"], "give --link such as"),
        (["--latency", "50"], "unknown latency '50'"),
        (["--latency", "0us"], "unknown latency '0us'"),
        (["--report", "/nowhere/at/all.html", "train.py"], "not a directory"),
    ],
)
def test_bad_input_is_said_with_status_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.slow
def test_help_has_an_example() -> None:
    output = CliRunner().invoke(app, ["--help"]).output
    assert "Example: thinwire analyze" in output
    assert "--json" in output

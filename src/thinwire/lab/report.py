"""Self-contained HTML reports: a result, text, tables and inline SVG plots in one file, and how it was made.

    report = Report("A title", "The conditions in one line", facts=[("Link", "955 Mbit/s, measured")])
    report.hero("2.9x faster", "than this model under stock DDP, with the same loss")
    report.figures([("bytes per step", "1.2 MB")])
    report.picture("Loss", draw, "Both runs start from the same parameters.", "Two falling curves that coincide.")
    report.table("Parameters", ["name", "bytes"], [["table.weight", "1.2 MB"]])
    report.code("import thinwire", "Add this line:")
    report.write("report.html")

``draw`` paints on axes of matplotlib; see `thinwire.lab.plot`. Without matplotlib the page has the tables and says how
to get plots.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from thinwire.lab import palette
from thinwire.lab.missing import naming
from thinwire.lab.plot import NARROW_INCHES, WIDE_INCHES, Draw, inline_svg

_NO_MATPLOTLIB = "Plots need matplotlib: <code>pip install '.[plot]'</code> in a checkout, then run the command again."
_COPY = "navigator.clipboard.writeText(this.nextElementSibling.innerText)"


@dataclass(frozen=True)
class Origin:
    """How a page was made: command line, versions, date (UTC) and machine."""

    command: str
    versions: str
    date: str
    machine: str

    @classmethod
    def of_this_process(cls) -> Origin:
        """Return the origin of what this process measures now."""
        program = Path(sys.argv[0])
        command = program.parent.name if program.name == "__main__.py" else program.name  # python -m thinwire
        return cls(
            shlex.join([command, *sys.argv[1:]]),
            f"thinwire {_version('thinwire')}, torch {_version('torch')}, Python {platform.python_version()}",
            datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            _machine(),
        )


def environment() -> dict[str, str]:
    """Return the versions, the system and the date (UTC) of a measurement, as entries of its JSON."""
    return {
        "thinwire": _version("thinwire"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{_processor()}, {cores} cores, {memory:.0f} GiB of memory, {platform.system()} {platform.machine()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


class Report:
    """A page whose parts are kept in the order in which they were added. All text is escaped.

    Args:
        title: what the page answers.
        subtitle: the conditions in one line.
        facts: further (name, value) pairs for "How this was made", such as the measured link.
        origin: command, versions, date and machine; by default of this process.
    """

    def __init__(
        self, title: str, subtitle: str = "", facts: Sequence[tuple[str, str]] = (), origin: Origin | None = None
    ) -> None:
        self._title = title
        self._subtitle = subtitle
        self._facts = tuple(facts)
        self._origin = origin or Origin.of_this_process()
        self._parts: list[str] = []
        self._ids = 0

    def hero(self, result: str, text: str = "", lossy: bool | None = None) -> None:
        """Add the result in large print and a sentence below it; ``lossy`` marks it as lossy or as exact."""
        kind = {None: "", True: "lossy", False: "exact"}[lossy]
        badge = f' <span class="badge">{kind}</span>' if kind else ""
        below = f"<p>{escape(text)}</p>" if text else ""
        self._parts.append(
            f'<section class="hero {kind}" aria-label="Result">'
            f'<p class="result">{escape(result)}{badge}</p>{below}</section>'
        )

    def text(self, paragraph: str) -> None:
        """Add a paragraph of plain text; here and in other sentences `backquotes` mark code."""
        self._parts.append(f"<p>{_with_code(paragraph)}</p>")

    def items(self, title: str, lines: Sequence[str]) -> None:
        """Add a heading and a list of sentences; nothing if there are none."""
        if lines:
            entries = "".join(f"<li>{_with_code(line)}</li>" for line in lines)
            self._section(escape(title), f"<ul>{entries}</ul>")

    def pairs(self, title: str, values: Sequence[tuple[str, str]]) -> None:
        """Add a heading and (name, sentence) pairs."""
        self._section(escape(title), _pairs(values))

    def code(self, text: str, title: str) -> None:
        """Add text to paste, with a button that copies it."""
        button = f'<button type="button" onclick="{_COPY}">Copy</button>'
        code = f'<pre tabindex="0"><code>{escape(text.strip())}</code></pre>'
        self._section(_with_code(title), f'<div class="code">{button}{code}</div>')

    def figures(self, values: Sequence[tuple[str, str]]) -> None:
        """Add figures of merit in large print: (what, value). Leave out what has no number."""
        cards = "".join(f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>" for what, value in values)
        if cards:
            self._parts.append(f'<dl class="figures" aria-label="Key figures">{cards}</dl>')

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
        """Add a table; the first column has the headings of the rows, the others are aligned right."""
        name = self._new_id()
        head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
        body = "".join(
            f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
            for row in rows
        )
        self._parts.append(
            f'<section><h2 id="{name}">{escape(title)}</h2>{_note(note)}'
            f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{name}">'
            f'<table><caption class="unseen">{escape(title)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
        )

    def picture(
        self, title: str, draw: Draw, note: str = "", description: str = "", height_inches: float = 3.2
    ) -> None:
        """Add a plot that ``draw`` paints on empty axes, once for wide windows and once for narrow ones.

        Args:
            note: remark above the plot.
            description: what can be seen in it, for readers who cannot; by default the note.
        """
        name = self._new_id()
        label = escape(f"{title}. {description or note}".strip(), quote=True)
        try:
            drawn = "".join(
                f'<div class="{form}" role="img" aria-label="{label}">'
                f"{inline_svg(draw, height_inches, width, f'{name}-{form}')}</div>"
                for form, width in (("wide", WIDE_INCHES), ("narrow", NARROW_INCHES))
            ).replace("<svg ", '<svg aria-hidden="true" focusable="false" ')  # named by the element around it
        except ImportError:
            drawn = f"<p>{_NO_MATPLOTLIB}</p>"
        heading = f'<figcaption><h2 id="{name}">{escape(title)}</h2>{_note(note)}</figcaption>'
        self._parts.append(f'<figure aria-labelledby="{name}">{heading}{drawn}</figure>')

    def html(self) -> str:
        """Return the whole page."""
        origin = self._origin
        made = [(name.capitalize(), value) for name, value in vars(origin).items()]
        own = Path(__file__)
        template, style = (own.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".html", ".css"))
        return template.format(
            title=escape(self._title),
            subtitle=escape(self._subtitle),
            made=escape(f"{origin.versions.partition(',')[0]} · {origin.date}"),
            style=style.replace("LIGHT;", f"{palette.css(dark=False)};").replace("DARK;", f"{palette.css(dark=True)};"),
            body="\n".join(self._parts),
            facts=_pairs([*made, *self._facts]),
        )

    def write(self, path: str | Path) -> None:
        """Write the page as UTF-8."""
        with naming(path):
            Path(path).write_text(self.html(), encoding="utf-8")

    def _section(self, heading: str, body: str) -> None:
        name = self._new_id()
        self._parts.append(f'<section aria-labelledby="{name}"><h2 id="{name}">{heading}</h2>{body}</section>')

    def _new_id(self) -> str:
        self._ids += 1
        return f"part{self._ids}"


def _with_code(text: str) -> str:
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


def _pairs(values: Sequence[tuple[str, str]]) -> str:
    entries = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values)
    return f'<dl class="pairs">{entries}</dl>'


def _note(note: str) -> str:
    return f'<p class="note">{escape(note)}</p>' if note else ""

"""Draw the figure of README from a result of `thinwire demo`, as SVG that reads on light and dark pages; and print the
rows of tables of the documents from results in benchmarks/results.

thinwire demo --json benchmarks/results/demo-4x1gbit.json
python tools/figures.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from thinwire.lab.demo.train import VARIANTS
from thinwire.lab.palette import DARK, STOCK, THINWIRE, TORCH

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "demo-4x1gbit.json"
FIGURE = ROOT / "docs" / "images" / "demo-4x1gbit.svg"

WORKLOADS = sorted(RESULT.parent.glob("workload-*.json"))
"""Results of `thinwire bench train` for docs/evidence/workloads.md: workload-JOB-4xLINK.json."""
LOSSES = sorted(RESULT.parent.glob("losses-*.json"))
"""Results of `thinwire bench train` for docs/guides/compression.md: losses-JOB.json, of which the rows are joined."""

HSDP = RESULT.parent / "hsdp-2x2x100mbit.json"
"""Result of benchmarks/fsdp_hsdp.py for docs/integrations/fsdp.md."""
EMBEDDINGS = RESULT.parent / "sentence-transformers.json"
"""Results of benchmarks/sentence_transformers_8x1gbit.py by link, for docs/integrations/sentence-transformers.md."""

COLORS = {"ddp": STOCK, "thinwire": THINWIRE, "ddp_sparse": TORCH, "thinwire_sparse": THINWIRE}
LEFT, WIDTH, BAR, GAP, TOP = 190, 360, 26, 12, 40


def rows(result: dict[str, Any]) -> list[str]:
    """Return the rows of README's table: variant, seconds and MB a step, speed against stock DDP."""
    stock = result["variants"][0]["step_seconds"]
    return [
        f"| {label(variant)} | {variant['step_seconds']:.2f} s | {variant['bytes_per_step'] / 1e6:.1f} MB |"
        f" {stock / variant['step_seconds']:.1f}x |"
        for variant in result["variants"]
    ]


def label(variant: dict[str, Any]) -> str:
    return next(known.label for known in VARIANTS if known.name == variant["name"])


def draw(result: dict[str, Any]) -> str:
    """Return a bar for each variant: the time of a step, labelled with seconds and the ratio to stock DDP."""
    stock = result["variants"][0]["step_seconds"]
    longest = max(variant["step_seconds"] for variant in result["variants"])
    title = f"Time of a training step, {result['hosts']} emulated hosts, {result['link_mbit']:.0f} Mbit/s measured"
    classes = {color: f"c{place}" for place, color in enumerate(dict.fromkeys(COLORS.values()))}
    light = " ".join(f".{name} {{ fill: {color} }}" for color, name in classes.items())
    dark = " ".join(f".{name} {{ fill: {DARK[color]} }}" for color, name in classes.items())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {TOP + len(result["variants"]) * (BAR + GAP)}"'
        f' role="img" aria-label="{title}" font-family="system-ui, sans-serif" font-size="14">',
        f"<title>{title}</title>",
        f"<style>text {{ fill: #24292f }} {light}",
        f"@media (prefers-color-scheme: dark) {{ text {{ fill: #d0d7de }} {dark} }}</style>",
        f'<text x="0" y="20" font-weight="600">{title}</text>',
    ]
    for place, variant in enumerate(result["variants"]):
        seconds, top = variant["step_seconds"], TOP + place * (BAR + GAP)
        width = max(2, round(WIDTH * seconds / longest))
        ratio = "" if variant["name"] == "ddp" else f", {stock / seconds:.1f}x faster"
        lines += [
            f'<text x="{LEFT - 10}" y="{top + 18}" text-anchor="end">{label(variant)}</text>',
            f'<rect class="{classes[COLORS[variant["name"]]]}" x="{LEFT}" y="{top}" width="{width}" height="{BAR}"/>',
            f'<text x="{LEFT + width + 8}" y="{top + 18}">{seconds:.2f} s{ratio}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def workload_rows() -> list[str]:
    """Return a row for each method of each workload and link: MB and seconds a step, and speed against stock DDP."""
    found = []
    for path in WORKLOADS:
        rows = json.loads(path.read_text())["rows"]
        stock = next(row for row in rows if row["method"] == "ddp")
        for row in sorted(rows, key=lambda row: (row is not stock, row["step_seconds_median"])):
            seconds, sent = row["step_seconds_median"], row["bytes_sent_max"]
            faster, fewer = stock["step_seconds_median"] / seconds, stock["bytes_sent_max"] / sent
            found.append(
                f"| `{row['job']}` | {row['link_mbit']:.0f} | `{row['method']}` | {sent / 1e6:.2f} | {seconds:.3f} |"
                f" {faster:.2f}x | {fewer:.1f}x |"
            )
    return found


def hsdp_rows() -> list[str]:
    """Return a row for each variant: seconds of a step, bytes of the host's interface, speed against stock FSDP2."""
    labels = {
        "stock": "stock FSDP2",
        "attach": "`attach(model)`, exact",
        "bf16": "`dense=bf16()`",
        "power_sgd(4)": "`dense=power_sgd(4)`",
    }
    result = json.loads(HSDP.read_text())
    stock = result["stock"]["step_seconds"]
    return [
        f"| {label} | {result[name]['step_seconds']:.2f} s | {result[name]['interface_bytes'] / 1e6:.2f} MB |"
        f" {stock / result[name]['step_seconds']:.2f} |"
        for name, label in labels.items()
    ]


def embedding_rows() -> list[str]:
    """Return rows for each link: bytes and seconds of a step by stock DDP and with thinwire, and their ratio."""
    lines = []
    for link, result in json.loads(EMBEDDINGS.read_text()).items():
        seconds = result["step_seconds"]
        stock, ours = seconds["stock"]["median"], seconds["thinwire"]["median"]
        dense, sent = (result["bytes_per_step"][name] / 1e6 for name in ("stock", "thinwire"))
        condition = f"{result['hosts']} hosts at {link}, width {result['settings']['width']}"
        lines += [
            f"| {condition} | bytes that a rank sends in a step |"
            f" {dense:.1f} MB |"
            f" {sent:.1f} MB | {result['bytes_ratio']:.0f} times fewer |",
            f"| | seconds of a step, median | {stock:.2f} | {ours:.2f} | {result['speedup']:.3g} times faster |",
        ]
        if result["settings"].get("more"):
            lines.append(
                f"| | the same after step {result['settings']['warm_up']} | {stock:.2f} |"
                f" {result['settled_seconds']['median']:.2f} | {result['settled_speedup']:.3g} times faster |"
            )
    return lines


def loss_rows() -> list[str]:
    """Return a row for each method: its final loss against stock DDP's in percent, and how many times fewer bytes.

    One column for each job, "-" where it was not run. Jobs and methods are in the order of their results.
    """
    by_job: dict[str, dict[str, dict[str, Any]]] = {}
    for path in LOSSES:
        for row in json.loads(path.read_text())["rows"]:
            by_job.setdefault(row["job"], {})[row["method"]] = row
    methods = dict.fromkeys(method for rows in by_job.values() for method in rows if method != "ddp")
    lines = ["| method | " + " | ".join(f"`{job}`" for job in by_job) + " |", "|---|" + "---|" * len(by_job)]
    for method in methods:
        cells = [_loss(rows.get(method), rows["ddp"]) for rows in by_job.values()]
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return lines


def _loss(row: dict[str, Any] | None, stock: dict[str, Any]) -> str:
    if row is None:
        return "-"
    return f"{row['final_loss'] / stock['final_loss'] - 1:+.1%}, {stock['bytes_sent_max'] / row['bytes_sent_max']:.0f}x"


if __name__ == "__main__":
    found = json.loads(RESULT.read_text())
    FIGURE.parent.mkdir(exist_ok=True)
    FIGURE.write_text(draw(found))
    tables = [*workload_rows(), *hsdp_rows(), *embedding_rows(), *loss_rows(), *rows(found)]
    print(*tables, f"wrote {FIGURE.relative_to(ROOT)}", sep="\n")

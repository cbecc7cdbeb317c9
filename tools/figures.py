"""Draw the figure of README from a result of `thinwire demo --json`, as SVG that reads on light and dark pages.

thinwire demo --link 1gbit --json benchmarks/results/demo-4x1gbit.json
python tools/figures.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "demo-4x1gbit.json"
FIGURE = ROOT / "docs" / "images" / "demo-4x1gbit.svg"

NAMES = {
    "ddp": "stock DDP, nn.Embedding",
    "thinwire": "the same + thinwire.attach",
    "ddp_sparse": "stock DDP, sparse=True",
    "thinwire_sparse": "sparse=True + thinwire.attach",
}
STOCK, THINWIRE = "#8a8f98", "#2f6fde"
LEFT, WIDTH, BAR, GAP, TOP = 235, 330, 26, 14, 40


def draw(result: dict[str, Any]) -> str:
    """Return a bar for each variant: the time of a step, labelled with seconds and the ratio to the first."""
    seconds = {variant["name"]: variant["step_seconds"] for variant in result["variants"]}
    longest = max(seconds.values())
    height = TOP + len(seconds) * (BAR + GAP) + 10
    title = f"Time of a training step, 4 emulated hosts at {result['link_mbit']:.0f} Mbit/s"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" role="img" aria-label="{title}"'
        ' font-family="system-ui, sans-serif" font-size="14">',
        f"<title>{title}</title>",
        "<style>text { fill: #24292f } @media (prefers-color-scheme: dark) { text { fill: #d0d7de } }</style>",
        f'<text x="0" y="20" font-weight="600">{title}</text>',
    ]
    for place, (name, value) in enumerate(seconds.items()):
        y = TOP + place * (BAR + GAP)
        bar = max(2.0, WIDTH * value / longest)
        color = THINWIRE if name.startswith("thinwire") else STOCK
        label = f"{value:.2f} s" + ("" if name == "ddp" else f", {seconds['ddp'] / value:.1f}x")
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 18}" text-anchor="end">{NAMES[name]}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{bar:.0f}" height="{BAR}" rx="3" fill="{color}"/>',
            f'<text x="{LEFT + bar + 8:.0f}" y="{y + 18}">{label}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    FIGURE.write_text(draw(json.loads(RESULT.read_text())))
    print(f"wrote {FIGURE.relative_to(ROOT)}")

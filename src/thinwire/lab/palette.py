"""Colours of all plots: one colour, one meaning, on every page and in every picture.

A colour is named by its value on white; `DARK` has its value on a dark page, where an inline SVG refers to it by a CSS
variable. Text of each colour has a contrast of at least 4.5 to 1 on its page, and the hues stay apart for readers who
confuse red and green.
"""

STOCK = "#687083"
"""Stock DDP, with dense gradients."""
THINWIRE = "#0067b5"
"""thinwire, exact."""
TORCH = "#a65a00"
"""PyTorch's own alternative: ``nn.Embedding(sparse=True)`` under stock DDP, an all-gather; DCP for checkpoints."""
LOSSY = "#a02f8c"
"""Ways that change the gradients: compressors, and a bfloat16 all-reduce."""
PUBLISHED = "#08776a"
"""Schemes of other systems: SparCML, OmniReduce, a parameter server."""
NETWORK = "#c03221"
"""Time in which training waits for the network."""
COMPUTE = "#8a7000"
"""Time in which processors work: forward, backward, optimizer, encoding."""

_ON_PAGES = {
    STOCK: ("--stock", "#a3abbb"),
    THINWIRE: ("--thinwire", "#5cabff"),
    TORCH: ("--torch", "#eba040"),
    LOSSY: ("--lossy", "#e585d4"),
    PUBLISHED: ("--published", "#3fc4ae"),
    NETWORK: ("--network", "#ff7d68"),
    COMPUTE: ("--compute", "#d3b43c"),
}
VARIABLES = {color: variable for color, (variable, _) in _ON_PAGES.items()}
"""The CSS variable of each colour."""
DARK = {color: dark for color, (_, dark) in _ON_PAGES.items()}
"""The value on a dark page of each colour."""

DASHES = ("-", (0, (5, 2)), (0, (1.2, 1.5)), (0, (7, 2, 1.5, 2)))
"""Line styles that tell lines of one colour apart."""


def css(dark: bool) -> str:
    """Return declarations of all CSS variables."""
    return "; ".join(f"{name}: {DARK[color] if dark else color}" for color, name in VARIABLES.items())

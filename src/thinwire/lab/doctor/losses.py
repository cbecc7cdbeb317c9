"""What compressors lose, from our own tables."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.compress.named import parse, split
from thinwire.compress.wrappers import code_of

SOURCE = "docs/guides/compression.md"


@dataclass(frozen=True)
class Loss:
    """The final held-out loss of trainings with a compressor against dense ones.

    Args:
        compressor: text of `thinwire.compress.named.parse`.
        job: the job of ``thinwire bench train``, or what else was trained.
        optimizer: "SGD" or "AdamW".
        steps: steps of the training.
        least, most: percent above the dense loss, over the seeds.
    """

    compressor: str
    job: str
    optimizer: str
    steps: int
    least: float
    most: float

    def describe(self) -> str:
        """Return the figure with its origin.

        Example:
            >>> Loss("qsgd:bits=8", "gpt", "AdamW", 300, 0.04, 0.04).describe()
            'loss +0.04 % (gpt, AdamW, 300 steps)'
        """
        percent = f"{self.least:+.2g}" + (f" to {self.most:+.2g}" if self.most != self.least else "")
        return f"loss {percent} % ({self.job}, {self.optimizer}, {self.steps} steps)"


LOSSES = (
    Loss("power_sgd:rank=8", "lstm", "SGD", 300, 0.3, 0.5),
    Loss("ef_sign_sgd", "lstm", "SGD", 300, 0.1, 0.7),
    Loss("top_k:density=0.03", "lstm", "SGD", 300, 0.4, 0.9),
    Loss("bf16", "lstm", "SGD", 80, 0.0, 0.0),
    Loss("qsgd:bits=8", "digits", "SGD", 400, 0.0, 0.2),
    Loss("bf16", "gpt", "AdamW", 300, 0.0, 0.0),
    Loss("power_sgd", "gpt", "AdamW", 300, 2.6, 2.6),
    Loss("top_k:density=0.01", "gpt", "AdamW", 300, 29.2, 29.2),
    Loss("qsgd:bits=8", "a character transformer", "AdamW", 300, 0.04, 0.04),
    Loss("power_sgd:rank=8", "a character transformer", "AdamW", 300, 1.9, 3.7),
    Loss("ef_sign_sgd", "a character transformer", "AdamW", 300, 5.6, 5.6),
    Loss("top_k:density=0.03", "a character transformer", "AdamW", 300, 14.6, 20.8),
)
"""The worst rows of the tables of `SOURCE`, for bf16 under SGD of that of docs/evidence/bench-train.md."""


def loss_of(compressor: str, optimizer: str) -> Loss | None:
    """Return the worst row of our tables for a compressor under such an optimizer; None if there is none.

    Rows of the same setting come before other rows, and rows of the same kind of optimizer before all: where
    it is not known or adaptive, that is AdamW. The worst one is taken because nobody knows which job yours is like.
    """
    kind = "SGD" if optimizer == "SGD" else "AdamW"
    all_rows = [row for row in LOSSES if split(row.compressor)[0] == split(compressor)[0]]
    rows = [row for row in all_rows if row.optimizer == kind] or all_rows
    same = [row for row in rows if _same(row.compressor, compressor)]
    return max(same or rows, key=lambda row: row.most, default=None)


def worst_loss(compressors: Sequence[str | None], optimizer: str) -> Loss | None:
    """Return the worst of `loss_of` these compressors."""
    losses = [loss for text in dict.fromkeys(compressors) if text and (loss := loss_of(text, optimizer))]
    return max(losses, key=lambda row: row.most, default=None)


def describe_loss(compressors: Sequence[str | None], optimizer: str) -> str:
    """Return what is known of the loss with these compressors, in a few words; empty if nothing is compressed."""
    lossy = list(dict.fromkeys(text for text in compressors if text))
    if not lossy:
        return ""
    loss = worst_loss(lossy, optimizer)
    if loss is None:
        return "loss not in our tables"
    is_other = not any(_same(loss.compressor, text) for text in lossy)
    return loss.describe() + (f", of {loss.compressor}" if is_other else "")


def loss_json(compressors: Sequence[str | None], optimizer: str) -> dict[str, Any] | None:
    """Return the row of `describe_loss` with its source; None if nothing is compressed, or nothing is known."""
    loss = worst_loss(compressors, optimizer)
    return None if loss is None else {**asdict(loss), "source": SOURCE}


def _same(one: str, other: str) -> bool:
    return code_of(parse(one)) == code_of(parse(other))

"""The text of Python's standard library with a small vocabulary, as samples for language models."""

from __future__ import annotations

import numpy as np
import torch

from thinwire.lab.bench.jobs.job import Data, Samples
from thinwire.lab.demo import corpus

_HELD_OUT_EVERY = 16


def load_text(num_words: int, length: int, num_samples: int, num_held_out: int) -> Data:
    """Return samples of ``length`` words, each to be predicted from those before it; int16 ``[samples, length]``.

    The ``num_words - 1`` most frequent words have ids of their own; all others share the last one, so that the
    gradients of embedding tables are dense (a full softmax touches every row anyway). The text is cut into pieces, of
    which evenly spread ones are kept; every sixteenth of these may be held out.
    """
    if not 1 < num_words <= 2**15:
        raise ValueError(f"the vocabulary has 2 to {2**15} words, not {num_words}")
    tokens = np.minimum(corpus.load().tokens, num_words - 1).astype(np.int16)
    pieces = torch.from_numpy(tokens[: len(tokens) // (length + 1) * (length + 1)]).view(-1, length + 1)
    numbers = torch.arange(len(pieces))
    held_out = pieces[numbers % _HELD_OUT_EVERY == 0]
    train = pieces[numbers % _HELD_OUT_EVERY != 0]
    return Data(_samples(_spread(train, num_samples)), _samples(_spread(held_out, num_held_out)))


def _spread(pieces: torch.Tensor, count: int) -> torch.Tensor:
    return pieces[:: max(1, len(pieces) // count)][:count]


def _samples(pieces: torch.Tensor) -> Samples:
    return Samples(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous())

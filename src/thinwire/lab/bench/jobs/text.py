"""The text of Python's standard library with a small vocabulary, as samples for language models."""

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.lab.bench.jobs.job import Data, Samples
from thinwire.lab.demo import corpus

_HELD_OUT_EVERY = 16


def load_text(num_words: int, length: int, num_samples: int, num_held_out: int) -> Data:
    """Return samples of ``length`` words, each to be predicted from those before it; integers ``[samples, length]``.

    The ``num_words - 1`` most frequent words have ids of their own; all others share the last one, so that the
    gradients of small embedding tables are dense (a full softmax touches every row anyway). The text is cut into
    pieces, of which evenly spread ones are kept; every sixteenth of these may be held out.
    """
    if num_words < 2:
        raise ValueError(f"the vocabulary has at least 2 words, not {num_words}")
    dtype = np.int16 if num_words <= 2**15 else np.int32
    tokens = np.minimum(corpus.load().tokens, num_words - 1).astype(dtype)
    pieces = torch.from_numpy(tokens[: len(tokens) // (length + 1) * (length + 1)]).view(-1, length + 1)
    numbers = torch.arange(len(pieces))
    held_out = pieces[numbers % _HELD_OUT_EVERY == 0]
    train = pieces[numbers % _HELD_OUT_EVERY != 0]
    return Data(_samples(_spread(train, num_samples)), _samples(_spread(held_out, num_held_out)))


def _spread(pieces: Tensor, count: int) -> Tensor:
    return pieces[:: max(1, len(pieces) // count)][:count]


def _samples(pieces: Tensor) -> Samples:
    return Samples(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous())


class WordTable(nn.Embedding):
    """Embedding table that is the output layer too, by a sampled softmax: its gradient has rows of few words.

    The softmax is over the true word and ``num_sampled`` others, drawn by Zipf's law as TensorFlow's log-uniform
    sampler does, of which every rank draws its own; in ``eval()`` it is over all words (Jean et al., ACL'15).
    """

    def __init__(self, num_words: int, dim: int, num_sampled: int) -> None:
        super().__init__(num_words, dim)
        self.num_sampled = num_sampled

    def logits(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, classes last, and the classes of the targets among them."""
        if not self.training:
            return states @ self.weight.T, targets
        drawn = torch.rand(self.num_sampled, device=states.device)
        sampled = (drawn * np.log(self.num_embeddings + 1)).exp().long().sub(1).clamp_(max=self.num_embeddings - 1)
        rows = self(torch.cat((targets.flatten(), sampled)))
        own, others = rows[: targets.numel()].view_as(states), rows[targets.numel() :]
        true = (states * own).sum(-1, keepdim=True) - _log_chance(targets)[..., None]
        other = states @ others.T - _log_chance(sampled)
        other = other.masked_fill(sampled == targets[..., None], float("-inf"))
        return torch.cat((true, other), -1), torch.zeros_like(targets)


def _log_chance(words: Tensor) -> Tensor:
    """Logarithm of the chance of a word under Zipf's law, up to a constant."""
    return torch.log1p(1.0 / (words + 1.0)).log()

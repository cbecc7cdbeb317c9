"""A word-level LSTM language model with two large embedding tables, of whose rows a step touches few.

The input table gets gradients for the words of the batch; the output table for the target words and a sample
of other words, because the softmax is *sampled* (Jean et al. 2015, "On Using Very Large Target Vocabulary for
Neural Machine Translation", section 3; in language models: Jozefowicz et al. 2016, "Exploring the Limits of
Language Modeling", section 3.1). This is the LSTM workload of the ZEN paper (section 2.1), made small.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Args:
        candidates: draws per step, before repeated words are dropped.
        sparse: whether gradients of the tables are sparse tensors, as in ``nn.Embedding(sparse=True)``; the default of
            `nn.Embedding` is False.
    """

    num_words: int
    embedding_dim: int = 128
    hidden_size: int = 128
    candidates: int = 4096
    sparse: bool = True


class LogUniform:
    """The Zipfian distribution P(word) = log((word + 2) / (word + 1)) / log(num_words + 1) over words.

    A sample makes the draws of one step and keeps each word once.

    >>> words = LogUniform(num_words=1000, draws=64).sample(seed=0, step=3)      # int64, sorted, at most 64
    """

    def __init__(self, num_words: int, draws: int) -> None:
        self.num_words = num_words
        self.draws = draws

    def sample(self, seed: int, step: int) -> Tensor:
        """Return the candidates of one step, int64, sorted, unique.

        The generator depends on seed and step only, so all ranks share the candidates, as is usual for large
        tables: the sampled part of the output table's gradient then overlaps completely between ranks.
        """
        # torch's CPU generator looks at the low 32 bits of a seed only.
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**32)
        uniform = torch.rand(self.draws, generator=generator, dtype=torch.float64)
        words = torch.exp(uniform * math.log(self.num_words + 1)).long() - 1
        return words.clamp_(max=self.num_words - 1).unique()

    def log_inclusion(self, words: Tensor) -> Tensor:
        """Return the log of the probability that a word is a candidate, log(1 - (1 - P(word))^draws), float32."""
        rank = words.double()
        probability = torch.log1p(1 / (rank + 1)) / math.log(self.num_words + 1)
        return torch.log(-torch.expm1(self.draws * torch.log1p(-probability))).float()


class LanguageModel(nn.Module):
    """Model that predicts each next word: embedding, LSTM, projection, sampled softmax."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.words_in = _word_table(config)
        self.lstm = nn.LSTM(config.embedding_dim, config.hidden_size, batch_first=True)
        self.projection = nn.Linear(config.hidden_size, config.embedding_dim)
        self.words_out = _word_table(config)

    @staticmethod
    def looked_up(words: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids that `forward` looks up in ``words_in`` and in ``words_out``: targets, then candidates."""
        # One look-up for both, so that the table has one gradient.
        return words[:, :-1], torch.cat([words[:, 1:].flatten(), candidates])

    def forward(self, words: Tensor, candidates: Tensor, sampler: LogUniform) -> Tensor:
        """Return the mean loss over ``words``, int64 ``[batch, time + 1]``: each word predicts the one after it.

        ``candidates`` are the sampled words of this step, int64 ``[num_candidates]``.
        """
        read, scored = self.looked_up(words, candidates)
        states, _ = self.lstm(self.words_in(read))
        context = self.projection(states).flatten(end_dim=1)
        return sampled_softmax_loss(context, self.words_out(scored), scored, sampler.log_inclusion(scored))


def _word_table(config: ModelConfig) -> nn.Embedding:
    weight = torch.empty(config.num_words, config.embedding_dim).uniform_(-0.1, 0.1)
    return nn.Embedding.from_pretrained(weight, freeze=False, sparse=config.sparse)


def sampled_softmax_loss(context: Tensor, rows: Tensor, words: Tensor, log_inclusion: Tensor) -> Tensor:
    """Return the cross entropy of the target against the candidates, a scalar of ``context``'s dtype.

    ``context`` is ``[n, dim]``. Of ``rows`` ``[n + m, dim]``, ``words`` and their log inclusion probabilities
    ``[n + m]``, the first n are those of the targets, the others of the candidates, which are distinct. Each logit is
    lowered by the log probability that its word was sampled, and a candidate that is the target itself is
    struck out (an "accidental hit"). With every word a candidate and inclusion 1, this is the full softmax.
    """
    count = len(context)
    target_logits = (context * rows[:count]).sum(dim=1) - log_inclusion[:count]
    candidate_logits = context @ rows[count:].T - log_inclusion[count:]
    hit = words[:count, None] == words[None, count:]
    logits = torch.cat([target_logits[:, None], candidate_logits.masked_fill(hit, -math.inf)], dim=1)
    return functional.cross_entropy(logits, torch.zeros_like(words[:count]))

"""An LSTM language model on the standard library's text."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from thinwire.lab.bench.jobs.job import Data, Job
from thinwire.lab.bench.jobs.text import load_text


@dataclass(frozen=True)
class LstmJob(Job):
    """Embedding, one LSTM layer, and a projection back to the embedding, whose table is also the output's (tied).

    1.19 million parameters, 4.8 MB of gradients, all dense: 22 % of them of the table, which is a ``Linear`` and so is
    compressed like any other matrix (an ``Embedding`` would be synchronized as rows).
    """

    name = "lstm"

    steps: int = 300
    learning_rate: float = 1.0
    clip_norm: float | None = 1.0
    num_words: int = 2000
    length: int = 24
    embedding_dim: int = 128
    hidden_size: int = 408

    def load(self) -> Data:
        return load_text(self.num_words, self.length, num_samples=60_000, num_held_out=320)

    def network(self) -> nn.Module:
        return LstmModel(self.num_words, self.embedding_dim, self.hidden_size)


class LstmModel(nn.Module):
    """Model of the next word: float32 logits ``[batch, length, num_words]`` for words ``[batch, length]``."""

    def __init__(self, num_words: int, embedding_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(embedding_dim, hidden_size, batch_first=True)
        self.projection = nn.Linear(hidden_size, embedding_dim)
        self.words = nn.Linear(embedding_dim, num_words)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        nn.init.zeros_(self.words.bias)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(functional.embedding(words.long(), self.words.weight))
        return self.words(self.projection(states))

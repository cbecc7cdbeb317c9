"""A small GPT on the standard library's text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.lab.bench.jobs.job import Data, Job
from thinwire.lab.bench.jobs.text import load_text


@dataclass(frozen=True)
class GptJob(Job):
    """Pre-norm transformer blocks over learned positions, with the embedding table tied to the output (a small GPT-2).

    1.15 million parameters, 4.6 MB of gradients: 31 % of them of the table, all dense.
    """

    name = "gpt"

    steps: int = 300
    learning_rate: float = 0.2
    clip_norm: float | None = 1.0
    num_words: int = 2000
    length: int = 24
    embedding_dim: int = 180
    num_heads: int = 4
    num_layers: int = 2

    def load(self) -> Data:
        return load_text(self.num_words, self.length, num_samples=60_000, num_held_out=320)

    def network(self) -> nn.Module:
        return GptModel(self)


class GptModel(nn.Module):
    """Model of the next word: float32 logits ``[batch, length, num_words]`` for words ``[batch, length]``."""

    def __init__(self, job: GptJob) -> None:
        super().__init__()
        self.words = nn.Linear(job.embedding_dim, job.num_words, bias=False)
        self.positions = nn.Parameter(torch.empty(job.length, job.embedding_dim))
        self.blocks = nn.Sequential(
            *(TransformerBlock(job.embedding_dim, job.num_heads) for _ in range(job.num_layers))
        )
        self.norm = nn.LayerNorm(job.embedding_dim)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                deviation = 0.02 / (2 * job.num_layers) ** 0.5 if name.endswith("out.weight") else 0.02
                nn.init.normal_(parameter, std=deviation)

    def forward(self, words: Tensor) -> Tensor:
        states = functional.embedding(words.long(), self.words.weight) + self.positions[: words.shape[1]]
        return self.words(self.norm(self.blocks(states)))


class TransformerBlock(nn.Module):
    """Causal self-attention and a GELU layer of four times the width, each behind a norm and around a shortcut."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.attention_in = nn.Linear(dim, 3 * dim)
        self.attention_out = nn.Linear(dim, dim)
        self.hidden_norm = nn.LayerNorm(dim)
        self.hidden_in = nn.Linear(dim, 4 * dim)
        self.hidden_out = nn.Linear(4 * dim, dim)

    def forward(self, states: Tensor) -> Tensor:
        batch, length, dim = states.shape
        parts = self.attention_in(self.attention_norm(states)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.attention_out(seen.transpose(1, 2).reshape(batch, length, dim))
        return states + self.hidden_out(functional.gelu(self.hidden_in(self.hidden_norm(states))))

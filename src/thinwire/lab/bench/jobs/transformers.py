"""Transformers on the standard library's text: a small GPT, a small BERT, and an embedding model (XLM-R)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.lab.bench.jobs.job import Data, Job, Published, Samples
from thinwire.lab.bench.jobs.text import WordTable, load_text

_IGNORED = -100  # target of a position that has none, as cross_entropy has it


@dataclass(frozen=True)
class TransformerJob(Job):
    """Base of jobs that train pre-norm transformer blocks over learned positions, by AdamW.

    Args:
        head_dim: width of an attention head; ``num_heads`` of them are the width of the model.
    """

    optimizer: str = "adamw"
    learning_rate: float = 0.0015
    clip_norm: float | None = 1.0
    num_words: int = 2000
    length: int = 24
    head_dim: int = 45
    num_heads: int = 4
    num_layers: int = 2

    @property
    def embedding_dim(self) -> int:
        return self.head_dim * self.num_heads

    def load(self) -> Data:
        return load_text(self.num_words, self.length, num_samples=60_000, num_held_out=320)


@dataclass(frozen=True)
class GptJob(TransformerJob):
    """The next word, with the embedding table tied to the output (a small GPT-2).

    1.15 million parameters, 4.6 MB of gradients: 31 % of them of the table, all dense.

    Published: GPT-2 small (Radford et al. 2019), 124M parameters.
    """

    published = Published(124.4e6, num_words=50_257, length=1024, head_dim=64, num_heads=12, num_layers=12)

    name: str = "gpt"

    def network(self) -> nn.Module:
        return GptModel(self)


class GptModel(nn.Module):
    """Model of the next word: logits ``[batch, length, num_words]`` for words ``[batch, length]``."""

    def __init__(self, job: TransformerJob) -> None:
        super().__init__()
        self.words = nn.Linear(job.embedding_dim, job.num_words, bias=False)
        self.positions = nn.Parameter(torch.empty(job.length, job.embedding_dim))
        self.blocks = _blocks(job, is_causal=True)
        self.norm = nn.LayerNorm(job.embedding_dim)
        _initialize(self, job.num_layers)

    def forward(self, words: Tensor) -> Tensor:
        states = functional.embedding(words.long(), self.words.weight) + self.positions[: words.shape[1]]
        return self.words(self.norm(self.blocks(states)))


@dataclass(frozen=True)
class BertJob(TransformerJob):
    """Masked words: 15 % of the words of a text are replaced by a mask and to be found (Devlin et al., NAACL'19).

    The table is tied to the output, so all gradients are dense. With ``sampled`` only its rows of words read, masked
    and sampled have gradients, as few as where BERT is fine-tuned without this output.

    Published: BERT-base, 110M parameters (without the second kind of segment and the pooler).

    Args:
        sampled: words drawn for a sampled softmax, see `WordTable`; 0 for a softmax over all.
    """

    published = Published(110e6, num_words=30_522, length=512, head_dim=64, num_heads=12, num_layers=12)

    name: str = "bert"
    steps: int = 200
    batch_size: int = 16
    num_words: int = 4000
    head_dim: int = 32
    num_layers: int = 3
    sampled: int = 0
    masked: float = 0.15

    def load(self) -> Data:
        text = load_text(self.num_words - 1, self.length, num_samples=60_000, num_held_out=640)
        generator = torch.Generator().manual_seed(0)
        return Data(self._masked(text.train, generator), self._masked(text.held_out, generator))

    def _masked(self, text: Samples, generator: torch.Generator) -> Samples:
        """The mask is the last word of the table, and each sample has as many: so losses are means of samples."""
        number = max(1, round(self.masked * self.length))
        positions = torch.rand(text.inputs.shape, generator=generator).argsort(1)[:, :number]
        words = text.inputs.int()
        targets = torch.full_like(words, _IGNORED).scatter(1, positions, words.gather(1, positions))
        return Samples(words.scatter(1, positions, self.num_words - 1), targets)

    def network(self) -> nn.Module:
        return BertModel(self)

    def objective(self, model: nn.Module, batch: Samples) -> Tensor:
        return functional.cross_entropy(*model(batch.inputs, batch.targets))


class BertModel(nn.Module):
    """Model of masked words: logits and targets among them, for words and targets ``[batch, length]``."""

    def __init__(self, job: BertJob) -> None:
        super().__init__()
        dim = job.embedding_dim
        self.words: nn.Linear | WordTable
        self.words = WordTable(job.num_words, dim, job.sampled) if job.sampled else nn.Linear(dim, job.num_words)
        self.encoder = Encoder(job)
        self.transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
        _initialize(self, job.num_layers)

    def forward(self, words: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        is_masked = targets != _IGNORED
        if isinstance(self.words, WordTable):
            states = self.transform(self.encoder(self.words(words.long()))[is_masked])
            return self.words.logits(states, targets[is_masked])
        states = self.encoder(functional.embedding(words.long(), self.words.weight))
        return self.words(self.transform(states[is_masked])), targets[is_masked]


@dataclass(frozen=True)
class XlmrJob(TransformerJob):
    """Fine-tuning of an embedding model: a query finds its document in the batch.

    Query and document are neighboring pieces of the text (the inverse cloze task of Lee et al., ACL'19). One encoder
    reads both, in two forwards before one backward; the loss is the cross entropy of their cosines, as in
    MultipleNegativesRankingLoss of sentence-transformers. Most parameters are the table's, whose
    gradient has rows of the words of a batch.

    Published: XLM-R base (Conneau et al., ACL'20), 278M parameters, 192M of them of the table.
    """

    published = Published(278e6, num_words=250_002, length=514, head_dim=64, num_heads=12, num_layers=12)

    name: str = "xlmr"
    steps: int = 150
    batch_size: int = 16
    learning_rate: float = 0.001
    num_words: int = 12_000
    length: int = 16
    head_dim: int = 32
    num_heads: int = 3
    temperature: float = 0.05

    def load(self) -> Data:
        text = load_text(self.num_words, 2 * self.length - 1, num_samples=60_000, num_held_out=128)
        return Data(self._pairs(text.train), self._pairs(text.held_out))

    def _pairs(self, text: Samples) -> Samples:
        words = torch.cat((text.inputs, text.targets[:, -1:]), 1)
        return Samples(words[:, : self.length].contiguous(), words[:, self.length :].contiguous())

    def network(self) -> nn.Module:
        return XlmrModel(self)

    def objective(self, model: nn.Module, batch: Samples) -> Tensor:
        scores = model(batch.inputs) @ model(batch.targets).T / self.temperature
        return functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


class XlmrModel(nn.Module):
    """Model of a text's meaning: the mean of its states as a unit vector, for words ``[batch, length]``."""

    def __init__(self, job: XlmrJob) -> None:
        super().__init__()
        self.words = nn.Embedding(job.num_words, job.embedding_dim)
        self.encoder = Encoder(job)
        _initialize(self, job.num_layers)

    def forward(self, words: Tensor) -> Tensor:
        return functional.normalize(self.encoder(self.words(words.long())).mean(1), dim=-1)


class Encoder(nn.Module):
    """Positions and blocks that see the whole text: ``[batch, length, dim]`` to the same shape."""

    def __init__(self, job: TransformerJob) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(job.length, job.embedding_dim))
        self.blocks = _blocks(job, is_causal=False)
        self.norm = nn.LayerNorm(job.embedding_dim)

    def forward(self, states: Tensor) -> Tensor:
        return self.norm(self.blocks(states + self.positions[: states.shape[1]]))


def _blocks(job: TransformerJob, *, is_causal: bool) -> nn.Sequential:
    return nn.Sequential(*(TransformerBlock(job, is_causal=is_causal) for _ in range(job.num_layers)))


def _initialize(model: nn.Module, num_layers: int) -> None:
    """Draw matrices as GPT-2 does: those before a shortcut are smaller the more there are."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            deviation = 0.02 / (2 * num_layers) ** 0.5 if name.endswith("out.weight") else 0.02
            nn.init.normal_(parameter, std=deviation)


class TransformerBlock(nn.Module):
    """Self-attention and a GELU layer of four times the width, each behind a norm and around a shortcut."""

    def __init__(self, job: TransformerJob, *, is_causal: bool) -> None:
        super().__init__()
        dim, self.num_heads, self.is_causal = job.embedding_dim, job.num_heads, is_causal
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
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        states = states + self.attention_out(seen.transpose(1, 2).reshape(batch, length, dim))
        return states + self.hidden_out(functional.gelu(self.hidden_in(self.hidden_norm(states))))

"""Recurrent language models and word vectors on the standard library's text."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.lab.bench.jobs.job import Data, Job, Published, Samples
from thinwire.lab.bench.jobs.text import WordTable, load_text


@dataclass(frozen=True)
class LstmJob(Job):
    """Embedding, one LSTM layer, and a projection back to the embedding, whose table is also the output's (tied).

    1.19 million parameters, 4.8 MB of gradients, all dense: 22 % of them of the table, which is a ``Linear`` and so is
    compressed like any other matrix (an ``Embedding`` would be synchronized as rows). With ``sampled`` the table is an
    ``Embedding``, and only rows of words read, predicted and sampled have gradients.

    Published: LSTM-2048-512 with the vocabulary of One Billion Word (Jozefowicz et al. 2016), of which ZEN (OSDI'25,
    table 1) counts 20M + 406M parameters.

    Args:
        sampled: words drawn for a sampled softmax, see `WordTable`; 0 for a softmax over all.
    """

    published = Published(426e6, num_words=793_471, length=20, embedding_dim=512, hidden_size=2048, batch_size=128)

    name: str = "lstm"
    steps: int = 300
    learning_rate: float = 1.0
    clip_norm: float | None = 1.0
    num_words: int = 2000
    length: int = 24
    embedding_dim: int = 128
    hidden_size: int = 408
    sampled: int = 0

    def load(self) -> Data:
        return load_text(self.num_words, self.length, num_samples=60_000, num_held_out=320)

    def network(self) -> nn.Module:
        return LstmModel(self)

    def objective(self, model: nn.Module, batch: Samples) -> Tensor:
        if not self.sampled:
            return super().objective(model, batch)
        return functional.cross_entropy(*model(batch.inputs, batch.targets.flatten()))


class LstmModel(nn.Module):
    """Model of the next word: float32 logits ``[batch, length, num_words]`` for words ``[batch, length]``.

    With a sampled softmax it needs the next words, ``[batch * length]``, and returns logits with the targets in them.
    """

    def __init__(self, job: LstmJob) -> None:
        super().__init__()
        self.lstm = nn.LSTM(job.embedding_dim, job.hidden_size, batch_first=True)
        self.projection = nn.Linear(job.hidden_size, job.embedding_dim)
        self.words: nn.Linear | WordTable
        if job.sampled:
            self.words = WordTable(job.num_words, job.embedding_dim, job.sampled)
        else:
            self.words = nn.Linear(job.embedding_dim, job.num_words)
            nn.init.zeros_(self.words.bias)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)

    def forward(self, words: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if isinstance(self.words, WordTable):
            assert targets is not None, "a sampled softmax is over the true words and few others"
            states, _ = self.lstm(self.words(words.long()))
            return self.words.logits(self.projection(states).flatten(end_dim=-2), targets)
        states, _ = self.lstm(functional.embedding(words.long(), self.words.weight))
        return self.words(self.projection(states))


@dataclass(frozen=True)
class NmtJob(Job):
    """Translation by LSTMs with attention (Luong et al., EMNLP'15): two tables, the target's also the output's.

    The other language is made from the text: each word has a translation, and pairs of words are swapped. The
    softmax is sampled, so both tables have sparse gradients; its held-out loss is over all words.

    Published: the parameters of ZEN's NMT (OSDI'25, table 1), 31M + 112M: two tables of 54,688 rows of 1,024, two
    bidirectional layers of 512 in the encoder, two of 1,024 in the decoder.
    """

    published = Published(143e6, num_words=54_688, length=24, dim=1024, sampled=2048, batch_size=64)

    name: str = "nmt"
    steps: int = 150
    optimizer: str = "adamw"
    learning_rate: float = 0.01
    clip_norm: float | None = 1.0
    num_words: int = 10_000
    length: int = 12
    dim: int = 64
    sampled: int = 256
    num_layers: int = 2

    def load(self) -> Data:
        text = load_text(self.num_words - 1, self.length - self.length % 2 - 1, num_samples=40_000, num_held_out=160)
        translations = torch.randperm(self.num_words - 1, generator=torch.Generator().manual_seed(0)) + 1
        return Data(self._translated(text.train, translations), self._translated(text.held_out, translations))

    def _translated(self, text: Samples, translations: Tensor) -> Samples:
        """Samples of both sentences, the second behind the word 0, and as targets the second."""
        words = torch.cat((text.inputs, text.targets[:, -1:]), 1)
        swapped = words.view(len(words), -1, 2).flip(-1).flatten(1)
        others = translations[swapped.long()].to(torch.int32)
        return Samples(torch.cat((words.int() + 1, functional.pad(others, (1, -1))), 1), others)

    def network(self) -> nn.Module:
        return NmtModel(self)

    def objective(self, model: nn.Module, batch: Samples) -> Tensor:
        return functional.cross_entropy(*model(batch.inputs, batch.targets.flatten()))


class NmtModel(nn.Module):
    """Model of the target's words: logits and targets among them, for both sentences ``[batch, 2 * length]``."""

    def __init__(self, job: NmtJob) -> None:
        super().__init__()
        half = max(1, job.dim // 2)
        self.source = nn.Embedding(job.num_words, job.dim)
        self.target = WordTable(job.num_words, job.dim, job.sampled)
        self.encoder = nn.LSTM(job.dim, half, job.num_layers, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTM(job.dim, 2 * half, job.num_layers, batch_first=True)
        self.combine = nn.Linear(4 * half, job.dim, bias=False)
        for table in (self.source, self.target):
            nn.init.uniform_(table.weight, -0.1, 0.1)

    def forward(self, sentences: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        source, target = sentences.long().chunk(2, 1)
        seen, _ = self.encoder(self.source(source))
        states, _ = self.decoder(self.target(target))
        context = (states @ seen.transpose(1, 2)).softmax(-1) @ seen
        combined = self.combine(torch.cat((context, states), -1)).tanh()
        return self.target.logits(combined.flatten(end_dim=-2), targets)


@dataclass(frozen=True)
class Word2VecJob(Job):
    """Skip-gram with negative sampling (Mikolov et al., NeurIPS'13): a table of words and one of their contexts.

    A sample is a word and one up to ``window`` positions from it. Words that are not its context are drawn in
    proportion to the power 0.75 of their frequency; the held-out loss is over such draws too, the same for all methods.

    Published: the vectors of GoogleNews, 3 million words and phrases of 300, two tables of which are trained.

    Args:
        sparse: whether the tables have ``sparse=True``, so that stock DDP gathers rows.
    """

    published = Published(1.8e9, num_words=3_000_000, dim=300)

    name: str = "word2vec"
    steps: int = 150
    batch_size: int = 512
    optimizer: str = "adagrad"
    learning_rate: float = 0.5
    num_words: int = 20_000
    dim: int = 64
    window: int = 5
    num_negative: int = 5
    sparse: bool = False

    def load(self) -> Data:
        text = load_text(self.num_words, 2 * self.window, num_samples=80_000, num_held_out=400)
        return Data(self._pairs(text.train), self._pairs(text.held_out))

    def _pairs(self, text: Samples) -> Samples:
        """The word in the middle of each piece, with each other word of it."""
        middle = text.inputs[:, self.window : self.window + 1].expand(-1, 2 * self.window)
        around = torch.cat((text.inputs[:, : self.window], text.targets[:, self.window :]), 1)
        return Samples(middle.flatten(), around.flatten())

    def network(self) -> nn.Module:
        return Word2VecModel(self)

    def objective(self, model: nn.Module, batch: Samples) -> Tensor:
        true, negative = model(batch.inputs, batch.targets)
        return -functional.logsigmoid(true).mean() - functional.logsigmoid(-negative).sum(1).mean()


class Word2VecModel(nn.Module):
    """Scores of pairs of a word and its context ``[batch]``, and of that word with others ``[batch, num_negative]``."""

    def __init__(self, job: Word2VecJob) -> None:
        super().__init__()
        self.num_negative = job.num_negative
        self.words = nn.Embedding(job.num_words, job.dim, sparse=job.sparse)
        self.contexts = nn.Embedding(job.num_words, job.dim, sparse=job.sparse)
        nn.init.uniform_(self.words.weight, -0.5 / job.dim, 0.5 / job.dim)
        nn.init.zeros_(self.contexts.weight)

    def forward(self, words: Tensor, contexts: Tensor) -> tuple[Tensor, Tensor]:
        drawn = torch.rand(len(words), self.num_negative, device=words.device)
        # Frequencies fall as 1 / id, so their power 0.75 has the distribution function (id / num_words)^0.25.
        negative = (drawn**4 * self.contexts.num_embeddings).long()
        scores = self.contexts(torch.cat((contexts.long()[:, None], negative), 1)) @ self.words(words.long())[..., None]
        return scores[:, 0, 0], scores[:, 1:, 0]

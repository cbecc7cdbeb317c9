"""Recommenders with many tables, on clicks drawn from a law: DLRM and DeepFM with the features of Criteo."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.lab.bench.jobs.job import Data, Job, Published, Samples

CRITEO_ROWS = (
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27, 14_992, 5_461_306,
    10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
"""Values of each categorical feature of Criteo's display advertising challenge (Kaggle), 33,762,577 in all."""
NUM_COUNTS = 13
"""Number of its features that are counts."""
SKEW = 1.05  # exponent of Zipf's law of each feature's values; our choice
_CLICKED = 0.26  # of all samples, as in Criteo's


@dataclass(frozen=True)
class ClicksJob(Job):
    """Base of jobs that predict clicks from 13 counts and 26 categorical features, by Adagrad.

    The data are generated: values of a feature by Zipf's law, the most frequent first, and a click from what each
    value is worth.

    Args:
        max_rows: rows of the largest tables, which further values of a feature share.
        dim: width of a table.
        sparse: whether the tables have ``sparse=True``, so that stock DDP gathers rows.
    """

    steps: int = 100
    batch_size: int = 256
    optimizer: str = "adagrad"
    learning_rate: float = 0.02
    max_rows: int = 30_000
    dim: int = 16
    sparse: bool = False

    @property
    def rows(self) -> tuple[int, ...]:
        """Number of rows of each table."""
        return tuple(min(rows, self.max_rows) for rows in CRITEO_ROWS)

    def load(self) -> Data:
        generator = torch.Generator().manual_seed(0)
        return Data(self._clicks(60_000, generator), self._clicks(4000, generator))

    def _clicks(self, number: int, generator: torch.Generator) -> Samples:
        """Samples of 13 counts and 26 ids, int32, and whether they were clicked."""
        counts = (2.0 * torch.randn(number, NUM_COUNTS, generator=generator)).exp().int()
        ids = torch.stack([_zipf(number, rows, generator) % self.max_rows for rows in CRITEO_ROWS], 1)
        worth = torch.sin(ids * torch.arange(1.0, len(CRITEO_ROWS) + 1)).sum(1) + 0.2 * counts.float().log1p().sum(1)
        worth = worth - worth.mean() + torch.logit(torch.tensor(_CLICKED))
        clicked = torch.rand(number, generator=generator) < worth.sigmoid()
        return Samples(torch.cat((counts, ids), 1), clicked.to(torch.int8))

    def objective(self, model: nn.Module, batch: Samples) -> Tensor:
        """Return the mean binary cross entropy in nats."""
        return functional.binary_cross_entropy_with_logits(model(batch.inputs), batch.targets.float())


def _zipf(number: int, rows: int, generator: torch.Generator) -> Tensor:
    """Draw ids below ``rows`` with a density of (id + 1)^-SKEW, int32."""
    drawn = torch.rand(number, generator=generator, dtype=torch.float64)
    power = 1.0 - SKEW
    ids = (1.0 + drawn * ((rows + 1.0) ** power - 1.0)) ** (1.0 / power) - 1.0
    return ids.int().clamp_(max=rows - 1)


class _Tables(nn.Module):
    """A table for each categorical feature: ids ``[batch, 26]`` to rows ``[batch, 26, dim]``."""

    def __init__(self, job: ClicksJob) -> None:
        super().__init__()
        tables = [nn.Embedding(rows, job.dim, sparse=job.sparse) for rows in job.rows]
        for table in tables:
            nn.init.normal_(table.weight, std=0.05)
        self.tables = nn.ModuleList(tables)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack([table(column) for table, column in zip(self.tables, ids.long().unbind(1), strict=True)], 1)


def _layers(*sizes: int) -> nn.Sequential:
    """Linear layers with a ReLU behind each but the last."""
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class DlrmJob(ClicksJob):
    """DLRM (Naumov et al. 2019): rows of the tables and a vector of the counts, their inner products, and a net on top.

    Published: the benchmark for Criteo (Kaggle) in its repository, tables of 16 and layers 13-512-256-64-16 and
    512-256-1: 540M parameters.
    """

    published = Published(540e6, max_rows=max(CRITEO_ROWS))

    name: str = "dlrm"

    def network(self) -> nn.Module:
        return DlrmModel(self)


class DlrmModel(nn.Module):
    """Model of clicks: logits ``[batch]`` for counts and ids ``[batch, 39]``."""

    def __init__(self, job: ClicksJob) -> None:
        super().__init__()
        self.tables = _Tables(job)
        self.bottom = _layers(NUM_COUNTS, 512, 256, 64, job.dim)
        number = len(CRITEO_ROWS) + 1
        self.top = _layers(job.dim + number * (number - 1) // 2, 512, 256, 1)
        self.pairs: Tensor
        self.register_buffer("pairs", torch.triu_indices(number, number, 1), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        counts = self.bottom(features[:, :NUM_COUNTS].float().log1p())
        vectors = torch.cat((counts[:, None], self.tables(features[:, NUM_COUNTS:])), 1)
        products = (vectors @ vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat((counts, products), 1))[:, 0]


@dataclass(frozen=True)
class DeepFmJob(ClicksJob):
    """DeepFM (Guo et al., IJCAI'17): a factorization machine and a net of three layers, both on the same tables.

    The last column of a table is the weight of the first order, the others are the factors.

    Published: the parameters of ZEN's DeepFM (OSDI'25, table 1), 68M + 214M: tables of 16, as Criteo has them with at
    most 2,650,774 rows, and layers of 5,724.
    """

    published = Published(282e6, max_rows=2_650_774, hidden_size=5724, batch_size=1024)

    name: str = "deepfm"
    hidden_size: int = 256

    def network(self) -> nn.Module:
        return DeepFmModel(self)


class DeepFmModel(nn.Module):
    """Model of clicks: logits ``[batch]`` for counts and ids ``[batch, 39]``."""

    def __init__(self, job: DeepFmJob) -> None:
        super().__init__()
        self.tables = _Tables(job)
        hidden = job.hidden_size
        self.deep = _layers(NUM_COUNTS + len(CRITEO_ROWS) * job.dim, hidden, hidden, hidden, 1)

    def forward(self, features: Tensor) -> Tensor:
        counts, rows = features[:, :NUM_COUNTS].float().log1p(), self.tables(features[:, NUM_COUNTS:])
        factors = rows[..., :-1]
        machine = 0.5 * (factors.sum(1).square() - factors.square().sum(1)).sum(1) + rows[..., -1].sum(1)
        return machine + self.deep(torch.cat((counts, rows.flatten(1)), 1))[:, 0]

"""A small demo."""

import numpy as np

from thinwire.lab.demo.corpus import Corpus
from thinwire.lab.demo.train import (
    TrainConfig,
)

NUM_WORDS = 500
CONFIG = TrainConfig(
    steps=3, batch_size=4, sequence_length=6, num_rows=500, embedding_dim=8, hidden_size=12, candidates=60
)


def corpus() -> Corpus:
    generator = np.random.default_rng(0)
    tokens = np.minimum(generator.zipf(1.3, 4000) - 1, NUM_WORDS - 1).astype(np.int32)
    return Corpus(tokens, tuple(f"word{rank}" for rank in range(NUM_WORDS)))

"""The built-in script of ``thinwire analyze``: the language model of the demo, on the ranks that torchrun starts."""

from itertools import count

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.lab.demo import corpus
from thinwire.lab.demo.model import LanguageModel, LogUniform
from thinwire.lab.demo.train import TrainConfig, batch, timed_step


def main() -> None:
    """Train without end, until the process is stopped."""
    dist.init_process_group("gloo")
    config = TrainConfig()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Adagrad builds sparse tensors; saying "no checks" aloud silences torch's warning that there are none.
    torch.sparse.check_sparse_tensor_invariants.disable()
    text = _load_once(rank)
    torch.manual_seed(config.seed)
    model = DistributedDataParallel(LanguageModel(config.model()), init_sync=False)
    optimizer = config.optimizer(model.parameters())
    sampler = LogUniform(config.num_rows, config.candidates)
    for step in count():
        words = batch(text.tokens, config, step, rank, world_size)
        timed_step(model, optimizer, words, sampler, config.seed, step)


def _load_once(rank: int) -> corpus.Corpus:
    """Rank 0 splits the text into words, the others find it in the cache."""
    if rank > 0:
        dist.barrier()
    text = corpus.load()
    if rank == 0:
        dist.barrier()
    return text


if __name__ == "__main__":
    main()

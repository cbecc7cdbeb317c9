"""A small transformer on characters: the job of the tutorial "compress safely". All its gradients are dense.

    torchrun --standalone --nproc-per-node 4 examples/mytrain.py

The commands of thinwire take its job as ``examples/mytrain.py:make``.
"""

import inspect
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LENGTH, WIDTH, BATCH = 64, 192, 8
TEXT = torch.tensor([ord(letter) % 128 for letter in inspect.getsource(nn.functional)])


class CharacterModel(nn.Module):
    """Predicts the next character by two transformer layers; characters come in as one-hot vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(128, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2)
        self.output = nn.Linear(WIDTH, 128)

    def forward(self, characters: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(characters.shape[1])
        return self.output(self.layers(self.inputs(nn.functional.one_hot(characters, 128).float()), mask=mask))


def make() -> tuple[nn.Module, Callable[[], Tensor], Callable[[nn.Module, Tensor], Tensor], torch.optim.Optimizer]:
    """Return the model, a function that makes a batch of this rank, the loss of a model on a batch, the optimizer."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = CharacterModel()
    data = torch.Generator().manual_seed(rank)

    def make_batch() -> Tensor:
        starts = torch.randint(len(TEXT) - LENGTH - 1, (BATCH,), generator=data)
        return torch.stack([TEXT[start : start + LENGTH + 1] for start in starts.tolist()])

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return model, make_batch, loss, torch.optim.AdamW(model.parameters(), lr=1e-3)


def main() -> None:
    dist.init_process_group("gloo")
    model, make_batch, loss, optimizer = make()
    model = DistributedDataParallel(model)
    for step in range(20):
        optimizer.zero_grad()
        value = loss(model, make_batch())
        value.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {value.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

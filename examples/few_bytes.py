"""Train by Muon and send few bytes: low rank in 4 bits, with the momentum where the bytes are saved.

    torchrun --standalone --nproc-per-node 2 examples/few_bytes.py [STEPS]

A small language model learns the characters of Python's own files. Gradients of its matrices travel as two factors of
rank 26 in 4 bits. ``ef21`` keeps the momentum, on each rank, and sends how it changes, so Muon itself has none. Tables,
which AdamW steps, have error feedback in its place. Vectors, which AdamW steps too, travel in float32: ``leave_small``.
"""

import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.compress import ef21, leave_small, mxfp4, power_sgd

WIDTH, LAYERS, CONTEXT, BATCH = 256, 2, 64, 4


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        nn.init.normal_(self.characters.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.characters(text[:, :-1]) + self.positions.weight
        logits = self.blocks(hidden, self.mask, is_causal=True) @ self.characters.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.tensor(list("".join(file.read_text() for file in files)[:1_000_000].encode("ascii", "replace")))

    model = DistributedDataParallel(LanguageModel())
    blocks = model.module.blocks
    matrices = [one for one in blocks.parameters() if one.ndim == 2]
    others = [one for one in model.parameters() if not any(one is matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=3e-3, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=3e-3)
    factors = power_sgd(0.1, values=mxfp4())
    dense = {"blocks.*": leave_small(ef21(factors, 0.9)), "characters.*": factors, "positions.*": factors}
    sync = thinwire.attach(model, dense=dense)

    torch.manual_seed(rank)  # each rank has data of its own
    for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 60):  # Muon takes 7 s a step without bfloat16 units
        first = torch.randint(0, len(text) - CONTEXT - 1, (BATCH, 1))
        loss = model(text[first + torch.arange(CONTEXT + 1)])
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    if rank == 0:
        rows = sync.table()
        sent, dense = (sum(row[key] for row in rows) for key in ("bytes", "dense_bytes"))
        print(f"{sent:,} bytes a step, of a rank; DDP sends {dense:,}, {dense / sent:.0f} times as many")
    sync.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

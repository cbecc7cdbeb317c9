"""Scripts that others wrote, by "gloo" and by "thinwire", on emulated hosts: losses, bytes, and seconds of steps.

    python benchmarks/scripts_of_others.py --ranks 4 --link 100mbit --steps 24 --skip 4
    python benchmarks/scripts_of_others.py --ranks 4 --link 1gbit --steps 80 --skip 50

They are modules of installed packages, run as they are: TRL's scripts, on a small language model and texts that are
made here, and accelerate's own checks of trainings. Trainers on CPUs take another back end than
Gloo only if the process group is there already, so the word is said before the script begins. A loss is what `backward`
is called on; a step ends with that of an optimizer, and takes as long as on its slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import runpy
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.lab.testbed.launch import preload, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link
from thinwire.lab.testbed.rank import RankContext

WORDS = "gloo", "thinwire"
VOCABULARY = [f"w{number}" for number in range(3000)]
COMMON = (
    "--use_cpu --bf16 false --model_name_or_path MODEL --output_dir OUT --report_to none --save_strategy no"
    " --disable_tqdm true --logging_steps 1 --learning_rate 1e-3 --gradient_checkpointing false --max_length 32"
    " --per_device_train_batch_size 4 --max_steps STEPS"
)
SCRIPTS = {
    "TRL sft": ("trl.scripts.sft", "--dataset_name TEXTS"),
    "TRL sft accumulating": (
        "trl.scripts.sft",
        "--dataset_name TEXTS --gradient_accumulation_steps 2 --max_grad_norm 0.1",
    ),
    "TRL dpo": ("trl.scripts.dpo", "--dataset_name PAIRS"),
    "TRL reward": ("trl.scripts.reward", "--dataset_name PAIRS"),
    "TRL kto": ("trl.scripts.kto", "--dataset_name LABELS"),
    "accelerate test_script": ("accelerate.test_utils.scripts.test_script", None),
}


def prepared(folder: Path) -> dict[str, str]:
    """Make a model and texts in a folder; return what stands for them in arguments."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed

    set_seed(0)
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{word: number for number, word in enumerate(VOCABULARY, 3)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<eos>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    config = GPT2Config(
        vocab_size=len(words), n_embd=192, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1,
        pad_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    chance = random.Random(0)

    def text(length: int) -> str:
        return " ".join(VOCABULARY[int(len(VOCABULARY) * chance.random() ** 3)] for _ in range(length))

    for name, row in {
        "texts": lambda: {"text": text(24)},
        "pairs": lambda: {"prompt": text(6), "chosen": text(12), "rejected": text(12)},
        "labels": lambda: {"prompt": text(6), "completion": text(12), "label": chance.random() < 0.5},
    }.items():
        (folder / name).mkdir()
        lines = (json.dumps(row()) for _ in range(2000))
        (folder / name / "train.jsonl").write_text("\n".join(lines))
    return {
        "MODEL": str(folder / "model"), "OUT": str(folder / "out"), "TEXTS": str(folder / "texts"),
        "PAIRS": str(folder / "pairs"), "LABELS": str(folder / "labels"),
    }  # fmt: skip


def run_script(
    context: RankContext, word: str, name: str, arguments: list[str] | None, folder: str
) -> tuple[list[float], list[float], dict[str, Any]]:
    """Return when steps ended, the losses, and what thinwire counted."""
    ended, losses = [], []
    os.environ |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    # As torchrun sets it: Accelerate gives each rank of a host all its processors, and emulated hosts share theirs.
    os.environ |= {"HF_DATASETS_CACHE": f"{folder}/cache{context.rank}", "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    os.chdir(folder)
    output = os.open(f"{folder}/output{context.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1), os.dup2(output, 2)
    dist.init_process_group(word)
    backward = torch.Tensor.backward

    def recorded(self: torch.Tensor, *options: Any, **more: Any) -> None:
        losses.append(float(self.detach().float().mean()))
        backward(self, *options, **more)

    torch.Tensor.backward = recorded  # type: ignore[method-assign]
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: ended.append(time.perf_counter()))
    sys.argv = [name, *(arguments or [])]
    counts: dict[str, Any] = {}
    if word == "thinwire":
        from thinwire import backend

        group = dist.group.WORLD
        assert isinstance(group, backend.ThinwireGroup)
        counts = group.counts
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return ended, losses, {key: vars(count) for key, count in counts.items()}


def compared(name: str, link: Link, ranks: int, steps: int, skip: int) -> dict[str, Any]:
    """Run a script by both words and return its figures."""
    module, arguments = SCRIPTS[name]
    row: dict[str, Any] = {"script": name, "ranks": ranks, "link_mbit": link.mbit, "steps": steps}
    for word in WORDS:
        with tempfile.TemporaryDirectory() as folder:
            standing = prepared(Path(folder)) | {"STEPS": str(steps)}
            texts = None if arguments is None else [standing.get(one, one) for one in f"{COMMON} {arguments}".split()]
            with EmulatedNetwork(ranks, link) if link.mbit else nullcontext() as network:
                before = [network.wire_bytes_sent(host) for host in range(ranks)] if network else []
                try:
                    outcomes = run_ranks(
                        run_script, word, module, texts, folder,
                        world_size=ranks, network=network, timeout_seconds=560, init_process_group=False,
                    )  # fmt: skip
                except Exception:
                    print((Path(folder) / "output0").read_text()[-3000:], file=sys.stderr)
                    raise
                if network:
                    sent = (network.wire_bytes_sent(host) - before[host] for host in range(ranks))
                    row[f"bytes by {word}"] = max(sent)
            values = [outcome.value for outcome in outcomes]
            gaps = [[b - a for a, b in zip(ended[skip:], ended[skip + 1 :], strict=False)] for ended, *_ in values]
            slowest = list(map(max, zip(*gaps, strict=False)))
            row[f"seconds by {word}"] = statistics.median(slowest) if slowest else float("nan")
            row[f"losses by {word}"] = [losses for _, losses, _ in values]
            row["stats"] = values[0][2]
    pairs = [
        (a, b)
        for stock, ours in zip(*(row[f"losses by {word}"] for word in WORDS), strict=True)
        for a, b in zip(stock, ours, strict=True)
    ]
    row["losses"] = len(pairs)
    row["difference"] = max((abs(a - b) / max(abs(a), 1e-9) for a, b in pairs), default=0.0)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scripts", default=",".join(SCRIPTS), help="names, or patterns of names, with commas between")
    parser.add_argument("--link", default="100mbit", help="none, or a rate such as 1gbit")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--skip", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for module in ("torch._dynamo", "transformers", "accelerate", "datasets"):
        preload(module)
    link, rows = Link.parse(options.link), []
    for name in SCRIPTS:
        if not any(fnmatch(name, pattern) for pattern in options.scripts.split(",")):
            continue
        try:
            row = compared(name, link, options.ranks, options.steps, options.skip)
        except Exception as error:
            print(f"{name:32} {type(error).__name__}: {str(error)[:600]}", flush=True)
            continue
        rows.append(row)
        stock, ours = (row[f"seconds by {word}"] for word in WORDS)
        ratio = row.get("bytes by thinwire", 0) / max(1, row.get("bytes by gloo", 1))
        print(
            f"{name:32} {options.link:>8} {options.ranks} ranks  gloo {1e3 * stock:7.1f} ms  thinwire"
            f" {1e3 * ours:7.1f} ms  {stock / ours:.2f}x  bytes {ratio:.3f}  {row['losses']} losses, at most"
            f" {row['difference']:.1e} apart",
            flush=True,
        )
        for key, count in row["stats"].items():
            if count["bytes_sent"] or count["reason"]:
                print(f"    {key}: {count['decision']}, {count['calls']} calls, {count['reason']}", flush=True)
    if options.json:
        about = {"torch": torch.__version__, "processors": os.cpu_count(), "system": platform.platform()}
        options.json.write_text(json.dumps({"environment": about, "rows": rows}))


if __name__ == "__main__":
    main()

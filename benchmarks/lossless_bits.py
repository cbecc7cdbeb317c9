"""Bits of a value that a lossless sum of real dense gradients sends, beside those of an ideal code.

    python benchmarks/lossless_bits.py --jobs lstm,gpt,digits,bert,resnet --hosts 2,4,8 --json out.json

For each job, with and without bfloat16 autocast, with gradients of one batch and of four accumulated, and for each
number of hosts: gradients are recorded as `thinwire bench sync --workload dense:...` does, and summed once on loopback.
Bits are push plus pull without the factor (n-1)/n, frames of messages included: an all-reduce of float32 has 64, of
bfloat16 32. Nothing here is timed. Rows are those of bench sync; with ``--json`` they are added to those in the file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from thinwire.lab.bench.dense.benchmark import DenseBenchmark, run
from thinwire.lab.bench.dense.rank import LOSSLESS
from thinwire.lab.bench.dense.workload import DenseWorkload

HEAD = ("workload", "n", "push", "pull", "sum", "ideal", "predicted", "same bits")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default="lstm,gpt,digits,bert,resnet", help="with their settings, see bench train")
    parser.add_argument("--hosts", default="2,4,8")
    parser.add_argument("--accumulate", default="1,4")
    parser.add_argument("--autocast", default="no,yes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    lists = (text.split(",") for text in (options.jobs, options.autocast, options.accumulate, options.hosts))
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    for job, autocast, accumulate, hosts in product(*lists):
        settings = ["autocast"] * (autocast == "yes") + [f"accumulate={accumulate}"] * (accumulate != "1")
        workload = DenseWorkload(":".join(("dense", job, *settings)))
        result = run(DenseBenchmark(workload, methods=(LOSSLESS,), hosts=int(hosts), repeat=1), lambda method: None)
        (row,) = result["rows"]
        cells = (
            row["workload"],
            hosts,
            f"{row['bits_push']:.2f}",
            f"{row['bits_pull']:.2f}",
            f"{row['bits_per_value']:.2f}",
            f"{row['ideal_bits_push']:.2f} + {row['ideal_bits_pull']:.2f}",
            f"{row['bytes_predicted_max'] / row['bytes_sent_max'] - 1:+.1%}",
            "yes" if row["bitwise_rank_order"] and row["bitwise_equal_across_ranks"] else "NO",
        )
        print("| " + " | ".join(cells) + " |", flush=True)
        if options.json is not None:
            earlier = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
            key = ("workload", "world_size")
            kept = [each for each in earlier if [each[name] for name in key] != [row[name] for name in key]]
            options.json.write_text(json.dumps({**result, "rows": [*kept, row]}, indent=1) + "\n")


if __name__ == "__main__":
    main()

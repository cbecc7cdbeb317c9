"""Plan for a published model from published figures: nothing is measured.

python benchmarks/plan_published.py vgg16 --hosts 8 --ranks-per-host 8 --link 25gbit --output plan.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from published.models import MODELS
from published.plan import INSIDE, plan_published, published_cluster
from thinwire.lab.cli.plan import print_costs
from thinwire.lab.collectives import cost_table
from thinwire.lab.testbed.network import Link
from thinwire.plan.text import format_bytes, format_seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--link", default="25gbit")
    parser.add_argument("--inside", default="pcie", choices=INSIDE, help="what joins the ranks of a host")
    parser.add_argument("--output", type=Path, help="write the plan here")
    parser.add_argument("--json", type=Path, help="write all figures here")
    given = parser.parse_args(arguments)
    mbit = Link.parse(given.link).mbit
    if mbit is None:
        parser.error("a published model is planned for a link with a rate: give --link such as 25gbit")
    cluster = published_cluster(given.hosts, given.ranks_per_host, mbit, given.inside)
    plan, model = plan_published(given.model, cluster), MODELS[given.model]()
    size_bytes = sum(model.size_bytes)
    rows = cost_table(cluster.world_size, size_bytes, cluster.inter)
    print_costs(rows, cluster.inter, cluster.world_size, size_bytes, Console())
    print(
        f"{given.model}: {model.num_tensors} tensors, {format_bytes(size_bytes)}, on {cluster.world_size} ranks;"
        f" a whole step takes {format_seconds(plan.step_seconds)}, {plan.speedup:.2f}x as fast as stock DDP."
    )
    print(plan.explain(), end="")
    if given.output is not None:
        plan.save(given.output)
    if given.json is not None:
        figures = {
            "plan": plan.to_json(),
            "model": {"name": given.model, "tensors": model.num_tensors, "bytes": size_bytes},
            "cluster": {"hosts": given.hosts, "ranks_per_host": given.ranks_per_host, "name": cluster.name},
            "costs": [asdict(row) for row in rows],
        }
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""All kinds of faults that checkpoints in peers' memory have to bear, one after the other, and how each ended.

    python benchmarks/fault_campaign.py                     # as Markdown, and to benchmarks/results/fault-campaign.json
    python benchmarks/fault_campaign.py --only wire,disk    # of these groups
    python benchmarks/fault_campaign.py --fast              # without those that take seconds

Ends with status 1 if one of them did not end as it must. Those of the group ``network`` need CAP_NET_ADMIN.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from thinwire.lab.report import environment
from thinwire.lab.testbed.network import NetAdminError, require_net_admin

_TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(_TESTS / "common"), str(_TESTS / "checkpoint" / "faults")]
from checkpoint_faults.campaign import KINDS, Result, run_all

RESULTS = Path(__file__).parent / "results" / "fault-campaign.json"


def row(result: Result) -> str:
    ended = str(result.outcome) if result.outcome is not None else result.problem
    says = result.outcome.says if result.outcome is not None and result.outcome.ended != "restored" else ""
    text = f"{ended}: {says}" if says else ended
    short = " ".join(text.split()).replace("|", "/")
    short = short if len(short) <= 160 else f"{short[:157]}..."
    return f"| {result.kind.group} | {result.kind.name} | {result.kind.what} | {short} |"


def has_namespaces() -> bool:
    try:
        require_net_admin()
    except NetAdminError as error:
        print(f"without the group network: {error}", file=sys.stderr)
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="groups, with commas between them; default all")
    parser.add_argument("--fast", action="store_true", help="leave out those that take seconds")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # every fault is logged, as it must be
    groups = {group for group in options.only.split(",") if group} or {kind.group for kind in KINDS}
    groups -= set() if "network" not in groups or has_namespaces() else {"network"}
    kinds = [kind for kind in KINDS if kind.group in groups and not (options.fast and kind.slow)]
    print("| group | kind | what was done | outcome |\n|---|---|---|---|")
    results = run_all(kinds, lambda result: print(row(result), flush=True))
    wrong = sum(result.wrong_restore for result in results)
    unexpected = [result.kind.name for result in results if not result.as_expected]
    print(f"\n{len(results)} kinds of faults, {wrong} wrong restores, not as they must: {unexpected or 'none'}")
    summary = {"kinds": len(results), "wrong_restores": wrong, "unexpected": unexpected}
    content = {"environment": environment(), "summary": summary, "rows": [result.to_json() for result in results]}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())

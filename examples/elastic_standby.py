"""A training whose lost hosts are replaced by themselves: torchrun with the thinwire rendezvous, and a standby host.

    python examples/elastic_standby.py                      # 3 "hosts" and a standby on this machine; one of them dies
    python examples/elastic_standby.py --emulated --faults "lose,lose the endpoint,freeze,workers"   # as root

Each "host" here runs the command that a real one would (docs/guides/elastic.md), and with it a holder and a worker. A
host is lost by ``kill -9`` of everything on it. No command follows: the others notice, the standby takes the place of
the lost host, its shard comes from the memory of a peer, and training goes on. At the end the parameters are compared,
to the bit, with those of a training that nothing disturbed.

With --emulated, hosts are network namespaces with links of their own, so that cables can be cut, too.
"""

import argparse
import sys
import time

from elastic_cluster import FAULTS, ElasticCluster, reference_digest, run_elastic


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--standbys", type=int, default=1)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--emulated", action="store_true", help="hosts with networks of their own; needs rights")
    parser.add_argument("--faults", default=",".join(FAULTS), help="with --emulated: one after the other")
    parser.add_argument("--seed", type=int, default=0, help="of the random victims and moments")
    options = parser.parse_args()
    if options.emulated:
        faults = options.faults.split(",")
        unknown = sorted(set(faults) - set(FAULTS))
        if unknown:
            sys.exit(f"unknown fault {unknown[0]!r}; legal are {', '.join(FAULTS)}")
        run_elastic(options.hosts, options.standbys, faults, options.seed, log=print)
        print("the parameters are those of an undisturbed training, to the bit")
        return
    with ElasticCluster(options.hosts, options.standbys, options.steps, emulated=False) as cluster:
        cluster.wait_for("step", step=20)
        training, before = cluster.training_hosts(), cluster.newest_round()
        victim, since = training[-1] or training[0], time.monotonic()  # host 0 serves the rendezvous here
        print(f"hosts {training} train as ranks 0, 1, ...; host {victim} is lost", flush=True)
        cluster.lose(victim)
        phases = cluster.seconds_until_going_on(since, before)
        print(f"hosts {cluster.training_hosts()} go on from step {phases['from_step']:.0f}")
        print(
            f"workers started after {phases['started']:.1f} s, had torch after {phases['imported']:.1f} s, their state"
            f" after {phases['restored']:.1f} s, and a step after {phases['step']:.1f} s"
        )
        digest = cluster.wait_until_finished()
    if digest != reference_digest(options.hosts, options.steps):
        sys.exit("the parameters are not those of an undisturbed training")
    print("the parameters are those of an undisturbed training, to the bit")


if __name__ == "__main__":
    main()

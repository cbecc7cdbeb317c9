#!/usr/bin/env bash
# Elastic training on hosts that you log in to: a holder beside torchrun, which starts workers again when one dies.
# On each host, with the same job.secret, HEAD and RUN:
#
#   ADDRESS=10.0.0.2 HEAD=10.0.0.1 NODES=2 PROCESSES=8 deploy/torchrun/train.sh deploy/train.py --replicas 2
#
# NODES=2:4 goes on with two to four hosts. On one host leave all of them out. With RENDEZVOUS=thinwire, hosts beyond
# NODES stand by and replace those that are lost; HEAD may then be a list, HOST:PORT,HOST:PORT, any of which may die.
set -euo pipefail

address=${ADDRESS:-127.0.0.1}   # where the other hosts reach this one
head=${HEAD:-$address}          # the host where torchrun's ranks meet
nodes=${NODES:-1}
processes=${PROCESSES:-2}
restarts=${RESTARTS:-3}
holder_port=${HOLDER_PORT:-7411}
memory=${HOLDER_MEMORY:-}       # such as 64GiB; default: half of what is available
export THINWIRE_RUN_ID=${RUN:-my-run}

# The same on all hosts: (umask 077; openssl rand -hex 32 > job.secret). A single host makes up its own.
if [[ -z ${THINWIRE_SECRET:-} && -f job.secret ]]; then
  THINWIRE_SECRET=$(cat job.secret)
  export THINWIRE_SECRET
fi

# torchrun of torch 2.13 shares one store between attempts, in which restarted workers find the addresses of dead ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

if ! thinwire holder --status > /dev/null 2>&1; then
  thinwire holder --bind "$address" --port "$holder_port" ${memory:+--memory-budget "$memory"} --detach
fi

# The holder stays after the end, so that the same command continues a run. To free it and its name:
# thinwire holder --forget "$THINWIRE_RUN_ID", and then thinwire holder --stop
[[ $head == *:* ]] || head=$head:${RENDEZVOUS_PORT:-29500}
exec torchrun --nnodes "$nodes" --nproc-per-node "$processes" --max-restarts "$restarts" --local-addr "$address" \
  --rdzv-backend "${RENDEZVOUS:-c10d}" --rdzv-endpoint "$head" --rdzv-id "$THINWIRE_RUN_ID" "$@"

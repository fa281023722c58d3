#!/usr/bin/env bash
# Start the ranks of one node of a run on several nodes: run it on every node, with that node's NODE_RANK.
set -euo pipefail
# shellcheck source=/dev/null
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

trap '' USR1 # a preemption signal must not end this node before `fmoe train` handles the signal

settings_of_training quickstart
variable NNODES "${SLURM_JOB_NUM_NODES:-1}" "number of nodes; in a Slurm job, that of the job"
variable NODE_RANK "${SLURM_NODEID:-0}" "number of this node, from 0; in a Slurm job, set by Slurm"
variable MASTER_ADDR 127.0.0.1 "name or address of node 0 that all nodes can reach"
variable MASTER_PORT 29500 "free port of node 0"
variable NPROC_PER_NODE "" "processes per node, checked against [parallel] of the recipe; empty: as many as it needs"
parse "usage: [VARIABLE=value ...] pretrain_multinode.sh [--recipe NAME] [--section.key value ...]

Starts the ranks of one node of a run on several nodes, which meet at MASTER_ADDR:MASTER_PORT. Run it
on every node with the same settings, except for NODE_RANK. Put run folder, corpora and tokenizer on a file system that
all nodes see. Options are keys of the recipe (fmoe train quickstart --help)." "$@"

nodes=()
((NNODES == 1)) || nodes=(--nodes "$NNODES" --node-rank "$NODE_RANK" --rendezvous "$MASTER_ADDR:$MASTER_PORT")
[[ -z $NPROC_PER_NODE ]] || nodes+=(--processes-per-node "$NPROC_PER_NODE")
train ${nodes[@]+"${nodes[@]}"}

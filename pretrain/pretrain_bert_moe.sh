#!/usr/bin/env bash
# Pretrain a BERT with experts on this machine.
set -euo pipefail
# shellcheck source=/dev/null
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

settings_of_training bert
parse "usage: [VARIABLE=value ...] pretrain_bert_moe.sh [--recipe NAME] [--section.key value ...]

Pretrains a BERT with experts on this machine, in as many processes as the recipe's [parallel] needs.
Options are keys of the recipe (fmoe train bert --help), e.g. --train.steps 1000." "$@"
train

#!/usr/bin/env bash
# Pretrain a Switch Transformer, a T5 with experts in every second layer, on this machine.
set -euo pipefail
# shellcheck source=/dev/null
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

settings_of_training t5
parse "usage: [VARIABLE=value ...] pretrain_switch_t5.sh [--recipe NAME] [--section.key value ...]

Pretrains a Switch Transformer, a T5 with experts in every second layer, on this machine, in as many processes as the
recipe's [parallel] needs. Options are keys of the recipe (fmoe train t5 --help), e.g. --train.steps 1000." "$@"
train

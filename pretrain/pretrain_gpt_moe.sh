#!/usr/bin/env bash
# Pretrain a Mixture-of-Experts GPT on this machine.
set -euo pipefail
# shellcheck source=/dev/null
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

settings_of_training quickstart
parse "usage: [VARIABLE=value ...] pretrain_gpt_moe.sh [--recipe NAME] [--section.key value ...]

Pretrains a Mixture-of-Experts GPT on this machine, in as many processes as the recipe's [parallel] needs.
Options are keys of the recipe (fmoe train quickstart --help), e.g. --moe.num-experts 32 --train.steps 1000." "$@"
train

#!/usr/bin/env bash
# Makes the default corpus, or that of ../docs/prepare.sh: text, tokenizer and token files. `--help` has the details.
set -euo pipefail

corpus=${CORPUS:-pylib}
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../$corpus" && pwd)

if [[ ${1-} == -h || ${1-} == --help ]]; then
  cat <<'HELP'
usage: prepare.sh [OUT_DIR]

Writes text (train.jsonl, validation.jsonl, test.jsonl), a tokenizer of 2,048 pieces (tokenizer.model) and the token
files of the three splits (train.bin, .idx, .json, ...) into OUT_DIR, by default the folder out next to the script. The
text is the sources of Python's standard library (data/pylib), or English documentation of this machine (data/docs). A
step whose outputs exist is skipped; delete OUT_DIR to start anew.

FMOE names the command to use, e.g. FMOE=.venv/bin/fmoe (default: fmoe).
HELP
  exit 0
fi
if (($# > 1)) || [[ ${1-} == -* ]]; then
  echo "usage: prepare.sh [OUT_DIR]     (prepare.sh --help for details)" >&2
  exit 2
fi

fmoe=${FMOE:-fmoe}
out=${1:-$here/out}

exec "$fmoe" data example "$corpus" --out "$out"

#!/usr/bin/env bash
# Makes a corpus of English documentation of this machine: text, tokenizer and token files. `--help` has the details.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
CORPUS=docs exec bash "$here/../pylib/prepare.sh" "$@"

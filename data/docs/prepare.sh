#!/usr/bin/env bash
# English documentation of this machine, from nothing to tokens. `--help` tells more.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
CORPUS=docs exec bash "$here/../pylib/prepare.sh" "$@"

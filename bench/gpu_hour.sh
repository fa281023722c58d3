#!/usr/bin/env bash
# The first hour on a GPU: bash bench/gpu_hour.sh [--rehearse] [STEP ...]
#
# Steps, in the order of their value; each takes less than ten minutes and is useful alone:
#   probe      versions, the GPU, its GEMM and copy rates
#   smoke      every part of the CUDA backend once, with a line for each
#   tests      tests/gpu: kernels and layers against float64, graphs, streams
#   perf       the layer against its peers at Mixtral's, Qwen3's and Switch's sizes, and with skewed loads
#   train      sixty steps of the quickstart, and a training step against megatron-core's own layer
#   sanitize   the kernels under compute-sanitizer's memcheck
# Without a STEP, all of them run. A failed step does not stop the others, but the script then exits with 1.
#
# It needs no network. Python packages that the machine lacks are installed from wheels in the folder WHEELS (default
# .wheels) into SITE (default /tmp/fmoe-site). Logs and reports are written to OUT (default bench/results/gpu).
#
# --rehearse prints the commands, and runs a small form of each on the CPU.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

REHEARSE=0
[ "${1:-}" = --rehearse ] && { REHEARSE=1; shift; }
STEPS=("$@")
[ $# = 0 ] && STEPS=(probe smoke tests perf train sanitize)
# The environment of the Makefile, where there is one.
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${OUT:-bench/results/gpu}
WHEELS=${WHEELS:-.wheels}
SITE=${SITE:-/tmp/fmoe-site}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$PWD/tests:$SITE${PYTHONPATH:+:$PYTHONPATH}"
# The C++ backend for the CPU is not built: nothing here measures it. The cache folder is new, as at a first start.
export FMOE_NATIVE=${FMOE_NATIVE:-0} FMOE_CACHE=${FMOE_CACHE:-$SITE/cache}
mkdir -p "$FMOE_CACHE"

if compgen -G "$WHEELS/*.whl" >/dev/null && [ ! -f "$SITE/.installed" ]; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$SITE" "$WHEELS"/*.whl &&
        touch "$SITE/.installed"
fi

failed=0
# run SECONDS COMMAND...: run the command with a time limit; in a rehearsal, only print it.
run() {
    echo "+ (at most $1 s) ${*:2}"
    [ "$REHEARSE" = 1 ] && return 0
    timeout --kill-after=5 "$1" "${@:2}" || { echo "== ended with $?"; failed=1; }
}
# rehearse COMMAND...: in a rehearsal, run the command, the small form of the last `run`.
rehearse() {
    [ "$REHEARSE" = 0 ] && return 0
    echo "  rehearsed by: $*"
    "$@" || { echo "== ended with $?"; failed=1; }
}

step() {
    case $1 in
    probe)
        command -v nvidia-smi >/dev/null && nvidia-smi
        run 120 "$PYTHON" -m bench gpu probe
        rehearse "$PYTHON" -m bench gpu probe --rehearse
        ;;
    smoke)
        run 300 "$PYTHON" -m bench gpu smoke
        rehearse "$PYTHON" -m bench gpu smoke --rehearse
        ;;
    tests)
        run 420 "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu --maxfail 40 --timeout 90 -k "not sanitizer"
        rehearse "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu --collect-only -k "not sanitizer"
        ;;
    perf)
        run 420 "$PYTHON" -m bench layer --device cuda --shapes mixtral,qwen3,switch --rounds 5 --seconds 30 \
            --out "$OUT"
        run 150 "$PYTHON" -m bench layer --device cuda --sweep skew --shapes qwen3 --values 1 2 4 \
            --passes forward+backward --rounds 5 --seconds 15 --no-peak --out "$OUT"
        rehearse "$PYTHON" -m bench layer --shapes tiny --rounds 2 --seconds 1 --threads 1 --no-peak --out "$OUT"
        ;;
    train)
        run 240 "$PYTHON" -m pretrain pretrain/recipes/quickstart.toml --parallel.expert 1 --train.precision bf16 \
            --train.steps 60 --tracking.no-wandb --run.folder "$OUT/run"
        run 300 "$PYTHON" -m bench step --precision bf16 --rounds 5 --out "$OUT"
        rehearse "$PYTHON" -m pretrain.launch quickstart --parallel.expert 1 --train.precision bf16 --dry-run
        ;;
    sanitize)
        run 300 "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu/test_gpu_sanitizer.py -k memcheck
        rehearse "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu/test_gpu_sanitizer.py --collect-only
        ;;
    *)
        echo "STEP=$1 is unknown: choose probe, smoke, tests, perf, train or sanitize"
        exit 2
        ;;
    esac
}

for name in "${STEPS[@]}"; do
    echo "=== $name"
    step "$name" > >(tee "$OUT/$name.log") 2>&1 || exit $?
done
exit "$failed"

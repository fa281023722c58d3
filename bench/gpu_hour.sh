#!/usr/bin/env bash
# The first hour on a GPU, in four calls of at most nine minutes, in the order of their value. Each is useful alone:
#
#   OUT=out bash bench/gpu_hour.sh layer   # the machine, every part of the backend once, the layer at three sizes
#   OUT=out bash bench/gpu_hour.sh tests   # tests/gpu in parallel, then the kernels under compute-sanitizer's memcheck
#   OUT=out bash bench/gpu_hour.sh train   # training with our kernels and without, a step against megatron-core's layer
#   OUT=out bash bench/gpu_hour.sh tune    # profiles of the slowest kernels, skewed loads, SonicMoE, tile sizes
#
# A call leaves one file in OUT (default bench/results/gpu), the archive gpu-CALL.tar.gz with its logs and reports, and
# prints its tables last. A command that fails does not stop the others, but the call then exits with 1. A command that
# reaches its limit gets SIGINT, so that it can report what it has. Without a CALL, all four run.
#
# No network is needed. Packages that the machine lacks are installed from wheels in the folder WHEELS (default .wheels)
# into SITE (default /tmp/fmoe-site): `train` needs megatron-core and sentencepiece. The corpus is CORPUS (default
# data/pylib/out), or if that is missing is made of the sources of Python's standard library. FMOE_CACHE may name a
# folder with kernels from `fmoe build --arch sm_90`; by default they are compiled, as at a first start.
#
# --rehearse runs small forms of the commands on the CPU. It fails where a call would: if the limits of its commands add
# up to more than nine minutes, data are missing, a measurement does not have our kernels, or a file lies beside the
# archive or is too large.
set -uo pipefail
case ${OUT:-/} in /*) ;; *) OUT=$PWD/$OUT ;; esac
cd "$(dirname "$0")/.." || exit

LIMIT=540 GRACE=10 MEGABYTES=16
failed=0
BEGIN=0 # the second of the script in which the call began
REHEARSE=0
[ "${1:-}" = --rehearse ] && { REHEARSE=1; shift; }
CALLS=("$@")
[ $# = 0 ] && CALLS=(layer tests train tune)
# The environment of the Makefile, where there is one.
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${OUT:-bench/results/gpu}
WHEELS=${WHEELS:-.wheels}
SITE=${SITE:-/tmp/fmoe-site}
CORPUS=${CORPUS:-data/pylib/out}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$PWD/tests:$SITE${PYTHONPATH:+:$PYTHONPATH}"
# The C++ backend for the CPU is not built: nothing here measures it.
export FMOE_NATIVE=${FMOE_NATIVE:-0} FMOE_CACHE=${FMOE_CACHE:-$SITE/cache}
mkdir -p "$FMOE_CACHE"

if compgen -G "$WHEELS/*.whl" >/dev/null && [ ! -f "$SITE/.installed" ]; then
    if "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$SITE" "$WHEELS"/*.whl; then
        touch "$SITE/.installed"
    else
        echo "== the wheels in $WHEELS do not install"
        failed=1
    fi
fi

running=0 CALL=
scratch=$(mktemp -d)
trap '[ "$running" = 0 ] || kill -KILL -- "-$running" 2>/dev/null; rm -rf "$scratch"' EXIT
trap 'archive; exit 130' INT TERM

fail() {
    echo "== $*" | tee -a "$WORK/failed.txt"
    failed=1
}

archive() { [ -z "$CALL" ] || tar -czf "$OUT/gpu-$CALL.tar.gz" -C "$WORK" .; }

# both NAME SECONDS COMMAND...: run the command, in a rehearsal too, with its output in NAME.log.
both() {
    local name=$1 seconds=$2 begin=$SECONDS code
    local left=$((LIMIT - SECONDS + BEGIN))
    shift 2
    budget=$((budget + seconds + GRACE))
    echo "+ ($name, at most $seconds s) $*"
    [ "$seconds" -le $((left - GRACE)) ] || seconds=$((left > GRACE ? left - GRACE : 1))
    [ "$REHEARSE" = 0 ] || seconds=600 # a slower machine
    # In a session of its own, so that nothing that it started outlives it; with SIGINT, which a shell's background
    # ignores; and without a pipe, which a process that hangs would hold open.
    setsid timeout --foreground --signal=INT --kill-after="$GRACE" "$seconds" \
        env --default-signal=INT "$@" >>"$WORK/$name.log" 2>&1 &
    running=$!
    wait "$running"
    code=$?
    kill -KILL -- "-$running" 2>/dev/null
    running=0
    tail -n 40 "$WORK/$name.log"
    echo "  $name ended with $code after $((SECONDS - begin)) s"
    [ "$code" = 0 ] || fail "$name ended with $code"
    archive
}

# run NAME SECONDS COMMAND...: the same, but in a rehearsal only check a benchmark's arguments, and that it has our kernels.
run() {
    if [ "$REHEARSE" = 0 ]; then
        both "$@"
        return
    fi
    local name=$1
    budget=$((budget + $2 + GRACE))
    echo "+ ($name, at most $2 s) ${*:3}"
    case "$*" in
    *"-m bench layer"* | *"-m bench step"*)
        "${@:3}" --list >"$WORK/$name.log" 2>&1 || fail "$name: $(tail -n 1 "$WORK/$name.log")"
        grep -q "^fmoe cuda" "$WORK/$name.log" || fail "$name: no contender is \"fmoe cuda\""
        ;;
    esac
}

# rehearse NAME COMMAND...: in a rehearsal, run the command, the small form of the last `run`.
rehearse() {
    [ "$REHEARSE" = 1 ] || return 0
    echo "  rehearsed by: ${*:2}"
    "${@:2}" >>"$WORK/$1.log" 2>&1 || { tail -n 5 "$WORK/$1.log"; fail "the rehearsal of $1 failed"; }
}

need() {
    [ -s "$1" ] || fail "$1 is missing"
}

layer() {
    run gpu 10 sh -c "nvidia-smi || echo none"
    run probe 40 "$PYTHON" -m bench gpu probe
    rehearse probe "$PYTHON" -m bench gpu probe --rehearse
    run smoke 140 "$PYTHON" -m bench gpu smoke
    rehearse smoke "$PYTHON" -m bench gpu smoke --rehearse
    run layer 300 "$PYTHON" -m bench layer --device cuda --shapes mixtral,qwen3,switch --passes forward+backward \
        --only "fmoe cuda" "fmoe cuda, loop" "fmoe cuda, grouped" "fmoe cuda, triton" "fmoe torch" "sorted grouped_mm" \
        --rounds 5 --seconds 15 --out "$WORK/layer"
    rehearse layer "$PYTHON" -m bench layer --shapes tiny --precision bf16 --only "fmoe torch" "sorted slices" \
        --rounds 2 --seconds 1 --threads 1 --no-peak --out "$WORK/layer"
}

tests() {
    local together=()
    "$PYTHON" -c "import xdist" 2>/dev/null && together=(-n "${WORKERS:-8}")
    # The layers come first, and the configurations of Triton's GEMMs, which take minutes, last.
    run tests 400 "$PYTHON" -m pytest -v -p no:cacheprovider --timeout 90 "${together[@]}" \
        tests/gpu/test_gpu_layer.py tests/gpu/test_gpu_gemms.py
    rehearse tests "$PYTHON" -m pytest -q -p no:cacheprovider --timeout 90 "${together[@]}" --collect-only tests/gpu
    run memcheck 110 "$PYTHON" -m pytest -v -p no:cacheprovider tests/gpu/test_gpu_sanitizer.py -k memcheck
    rehearse memcheck "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu/test_gpu_sanitizer.py --collect-only
}

train() {
    local corpus=$CORPUS recipe=(quickstart --parallel.expert 1 --train.precision bf16 --tracking.no-wandb)
    if [ ! -s "$corpus/train.idx" ]; then
        corpus=$scratch/corpus
        both corpus 30 "$PYTHON" -m fmoe data corpus --out "$corpus"
        head -n 300 "$corpus/train.jsonl" >"$corpus/some.jsonl"
        both tokenizer 40 "$PYTHON" -m fmoe data tokenizer "$corpus/some.jsonl" --vocab-size 2048 \
            --out "$corpus/tokenizer.model"
        both prepare 30 "$PYTHON" -m fmoe data prepare "$corpus/some.jsonl" --tokenizer "$corpus/tokenizer.model" \
            --out "$corpus/train"
    fi
    need "$corpus/train.idx"
    need "$corpus/tokenizer.model"
    recipe+=(--data.tokenizer "$corpus/tokenizer.model" --data.train "$corpus/train" --data.validation "$corpus/train")
    # Sixty steps of each, compared by the tokens per second of their last lines.
    run cuda 90 "$PYTHON" -m pretrain "${recipe[@]}" --train.steps 60 --run.folder "$scratch/cuda" \
        --moe.expert_options.backend cuda # an error without the kernels
    rehearse cuda "$PYTHON" -m pretrain "${recipe[@]}" --train.steps 2 --optimizer.warmup_steps 1 \
        --model.num_layers 1 --model.sequence_length 64 --train.validation_every 1 \
        --train.global_batch 2 --train.micro_batch 2 --train.validation_sequences 2 --run.folder "$scratch/cpu"
    run torch 90 env FMOE_CUDA=0 "$PYTHON" -m pretrain "${recipe[@]}" --train.steps 60 --run.folder "$scratch/torch"
    run step 170 "$PYTHON" -m bench step --device cuda --precision bf16 --rounds 5 --out "$WORK/step"
}

tune() {
    local qwen3=(--device cuda --shapes qwen3 --passes forward+backward --rounds 5 --no-peak)
    run profile 50 "$PYTHON" -m bench gpu profile
    rehearse profile "$PYTHON" -m bench gpu profile --rehearse
    run kernels 80 "$PYTHON" -m bench gpu kernels
    rehearse kernels "$PYTHON" -m bench gpu kernels --rehearse
    run skew 90 "$PYTHON" -m bench layer "${qwen3[@]}" --sweep skew --values 1 2 4 --seconds 10 \
        --only "fmoe cuda" "fmoe cuda, triton" "sorted grouped_mm" --out "$WORK/skew"
    # SonicMoE's GEMMs are those of QuACK; without the package, only ours is measured.
    run sonicmoe 80 "$PYTHON" -m bench layer "${qwen3[@]}" --seconds 10 \
        --only "fmoe cuda" "fmoe sonicmoe" SonicMoE --out "$WORK/sonicmoe"
    # Tile sizes that have been measured when the limit is reached are kept.
    run tune 170 env FMOE_TUNE=1 "$PYTHON" -m bench layer "${qwen3[@]}" --seconds 10 \
        --only "fmoe cuda, triton" "fmoe cuda, grouped" --out "$WORK/tune"
    cp "$FMOE_CACHE"/*.json "$WORK" 2>/dev/null
}

tables() {
    local file pattern
    for file in "$WORK"/*.log; do
        case $(basename "$file" .log) in
        probe | smoke) pattern='TFLOP|TB/s|FAILED|skipped|failed' ;;
        tests | memcheck) pattern='^(FAILED|ERROR|=.*(passed|failed|skipped|error))' ;;
        cuda | torch) pattern='^step' ;;
        kernels) pattern='^\||Duration|Throughput  *%|Registers Per' ;;
        *) continue ;;
        esac
        echo "--- $(basename "$file" .log)"
        grep -E "$pattern" "$file" | tail -n 20 | cut -c 1-200
    done
    for file in "$WORK"/*/*.md; do
        [ -e "$file" ] || continue
        echo "--- $(basename "$(dirname "$file")")"
        grep -E '^(\||Machine|\* (failed|met|MISSED))' "$file"
    done
    [ ! -e "$WORK/failed.txt" ] || cat "$WORK/failed.txt"
}

call() {
    local extra
    CALL=$1 WORK=$scratch/$1 budget=0
    mkdir "$WORK"
    echo "=== $CALL"
    touch "$scratch/began"
    case $CALL in
    layer) layer ;;
    tests) tests ;;
    train) train ;;
    tune) tune ;;
    esac
    [ "$budget" -le "$LIMIT" ] || fail "the limits of $CALL add up to $budget s, more than $LIMIT s"
    archive
    extra=$(find "$OUT" -type f -newer "$scratch/began" ! -name "gpu-$CALL.tar.gz")
    [ -z "$extra" ] || fail "these files lie beside the archive: ${extra//$'\n'/ }"
    [ -z "$(find "$OUT/gpu-$CALL.tar.gz" -size "+${MEGABYTES}M")" ] || fail "the archive has more than $MEGABYTES MiB"
    tables
    BEGIN=$SECONDS
}

for name in "${CALLS[@]}"; do
    case $name in
    layer | tests | train | tune) ;;
    *)
        echo "CALL=$name is unknown: choose layer, tests, train or tune"
        exit 2
        ;;
    esac
done
for name in "${CALLS[@]}"; do
    call "$name"
done
exit "$failed"

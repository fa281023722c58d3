# Functions of the launch scripts, which source this file: `variable` declares a setting with its help, `train` starts
# `fmoe train`.
# shellcheck shell=bash

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
settings=

# variable NAME DEFAULT MEANING: set NAME from the environment or the default, and add it to the help.
variable() {
    printf -v "$1" '%s' "${!1:-$2}"
    settings+=$(printf '  %-16s %s [%s]' "$1" "$3" "${2:-empty}")$'\n'
}

# settings_of_training RECIPE: declare the settings of all scripts.
settings_of_training() {
    variable RECIPE "$1" "a shipped recipe or a TOML file; the same as --recipe NAME"
    variable RUN_FOLDER "" "folder of the run (run.folder); empty: as the recipe says"
    variable RESUME auto "auto: resume if there is a checkpoint; run: resume; none: a new run; or a folder"
    variable TOKENIZER "" "data.tokenizer; empty: as the recipe says"
    variable TRAIN_DATA "" "prefixes of prepared corpora, separated by spaces (data.train); empty: as the recipe says"
    variable VALIDATION_DATA "" "prefixes of validation corpora (data.validation); empty: as the recipe says"
    variable MAX_RESTARTS 0 "maximum number of restarts after a process died, from the newest checkpoint"
    variable DRY_RUN 0 "1: print the resolved recipe, the process grid and bytes per rank, and stop"
    variable PYTHON "" "Python interpreter; empty: the active environment's, this checkout's .venv, or python3"
}

# parse TEXT ARGS...: handle --help, which prints TEXT and the settings, and --recipe; collect the rest in OVERRIDES.
parse() {
    local text=$1
    OVERRIDES=()
    shift
    while (($#)); do
        case $1 in
        -h | --help)
            printf '%s\n\n%s\n%s' "$text" "Environment variables [and their defaults]:" "$settings"
            exit 0
            ;;
        --recipe | --recipe=*)
            if [[ $1 == *=* ]]; then RECIPE=${1#*=}; elif (($# > 1)); then RECIPE=$2 && shift; else
                echo "$(basename "$0"): error: --recipe needs a name" >&2
                exit 2
            fi
            ;;
        *) OVERRIDES+=("$1") ;;
        esac
        shift
    done
}

# Set PYTHON to the first interpreter that has the packages for training. In a checkout, use the checkout's packages.
find_python() {
    local candidate
    if [[ -f $here/../pyproject.toml ]]; then
        export PYTHONPATH="${here%/*}${PYTHONPATH:+:$PYTHONPATH}"
    fi
    for candidate in "$PYTHON" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "$here/../.venv/bin/python" \
        "$here/../../../../bin/python" python3 python; do
        if [[ -n $candidate ]] && "$candidate" -P -c '
import importlib.util, sys
sys.exit(any(importlib.util.find_spec(name) is None for name in ("torch", "megatron", "sentencepiece", "pretrain")))
' 2>/dev/null; then
            PYTHON=$candidate
            return
        elif [[ -n $candidate && $candidate == "$PYTHON" ]]; then
            break
        fi
    done
    echo "$(basename "$0"): error: no Python with fmoe[pretrain] found${PYTHON:+: PYTHON=$PYTHON}; make train creates one" >&2
    exit 2
}

# train ARGS...: replace this process with `fmoe train` with the settings, ARGS and OVERRIDES.
train() {
    local -a arguments words
    find_python
    arguments=("$RECIPE")
    [[ $RESUME == none ]] || arguments+=(--resume "$RESUME")
    [[ -z $RUN_FOLDER ]] || arguments+=(--run.folder "$RUN_FOLDER")
    [[ -z $TOKENIZER ]] || arguments+=(--data.tokenizer "$TOKENIZER")
    if [[ -n $TRAIN_DATA ]]; then
        read -ra words <<<"$TRAIN_DATA"
        arguments+=(--data.train "${words[@]}")
    fi
    if [[ -n $VALIDATION_DATA ]]; then
        read -ra words <<<"$VALIDATION_DATA"
        arguments+=(--data.validation "${words[@]}")
    fi
    [[ $MAX_RESTARTS == 0 ]] || arguments+=(--max-restarts "$MAX_RESTARTS")
    [[ $DRY_RUN == 0 ]] || arguments+=(--dry-run)
    exec "$PYTHON" -P -m pretrain.start.launch "${arguments[@]}" "$@" ${OVERRIDES[@]+"${OVERRIDES[@]}"}
}

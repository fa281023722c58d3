#!/usr/bin/env bash
# Corpora of bytes: a token per byte of Python sources, of English documentation, and of enwik8.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
usage="usage: prepare.sh [--enwik8 FILE] [OUT_DIR]"

if [[ ${1-} == -h || ${1-} == --help ]]; then
  cat <<HELP
$usage

Writes a tokenizer of single bytes (tokenizer.json) and, in the folders pylib and docs, the token files of three splits
(train.bin, .idx, .json, ...) into OUT_DIR, by default the folder out beside this script. With --enwik8, FILE is the
unpacked enwik8 of 100,000,000 bytes; the folder enwik8 gets its first 90,000,000 bytes as train, the next 5,000,000 as
validation and the last 5,000,000 as test. A step whose outputs exist is skipped; delete OUT_DIR to start anew.

FMOE names the command to use, e.g. FMOE=.venv/bin/fmoe (default: fmoe).
HELP
  exit 0
fi
enwik8=
if [[ ${1-} == --enwik8 ]] && (($# > 1)); then
  enwik8=$2
  shift 2
fi
if (($# > 1)) || [[ ${1-} == -* ]]; then
  echo "$usage     (prepare.sh --help for details)" >&2
  exit 2
fi

fmoe=${FMOE:-fmoe}
out=${1:-$here/out}
splits="train validation test"

if [[ -n $enwik8 ]]; then
  size=$(wc -c < "$enwik8") || exit 2
  if ((size != 100000000)); then
    echo "prepare.sh: $enwik8 has $((size)) bytes, not the 100000000 of enwik8: unpack enwik8.zip first" >&2
    exit 2
  fi
  expected=2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8
  found=$(if command -v sha256sum > /dev/null; then sha256sum; else shasum -a 256; fi < "$enwik8")
  if [[ ${found%% *} != "$expected" ]]; then
    echo "prepare.sh: $enwik8 is not enwik8: its SHA-256 is ${found%% *}, not $expected" >&2
    exit 2
  fi
fi

if [[ ! -e $out/tokenizer.json ]]; then
  "$fmoe" data tokenizer --model-type bytes --out "$out/tokenizer.json"
fi
for corpus in pylib docs; do
  if [[ ! -e $out/$corpus/test.jsonl ]]; then
    "$fmoe" data corpus "$corpus" --out "$out/$corpus" --overwrite
  fi
  for split in $splits; do
    if [[ ! -e $out/$corpus/$split.idx ]]; then
      "$fmoe" data prepare "$out/$corpus/$split.jsonl" --tokenizer "$out/tokenizer.json" --out "$out/$corpus/$split" \
        --overwrite
    fi
  done
done
if [[ -n $enwik8 ]]; then
  mkdir -p "$out/enwik8"
  start=0
  for split in $splits; do
    length=5000000
    [[ $split == train ]] && length=90000000
    if [[ ! -e $out/enwik8/$split.idx ]]; then
      tail -c "+$((start + 1))" "$enwik8" | head -c "$length" > "$out/enwik8/$split.raw" || true # head closes tail's pipe
      "$fmoe" data prepare "$out/enwik8/$split.raw" --format bytes --tokenizer "$out/tokenizer.json" \
        --out "$out/enwik8/$split" --overwrite
      rm "$out/enwik8/$split.raw"
    fi
    start=$((start + length))
  done
fi
echo "$out is complete"

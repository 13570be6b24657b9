#!/usr/bin/env bash
# Compares `megatron preprocess` with the tokenizers library's encode_batch_fast on the same text,
# on one core each, alternating; prints a Markdown table.
#
#   PYTHON=.venv/bin/python tools/bench/preprocess.sh      a Python with `tokenizers`
#
# Settings (environment):
#   PYTHON    [python3]
#   MB        of JSON lines: this repository's documents and sources, repeated           [40]
#   VOCAB     tokens of the vocabulary, trained on that text                             [8192]
#   ROUNDS    runs of each; the fastest counts, and the median is given                  [5]
#   CORE      the core to run on, with taskset                                           [0]
# This program reads and parses the file, tokenizes, and writes the dataset; the library is timed
# without reading or writing. Both see the same words repeatedly, and cache them.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} mb=${MB:-40} vocab=${VOCAB:-8192} rounds=${ROUNDS:-5} core=${CORE:-0}
megatron=$(realpath -m "${CARGO_TARGET_DIR:-target}/release/megatron")
[ -x "$megatron" ] || { echo "build first: cargo build --release" >&2; exit 1; }
"$python" -c 'import tokenizers' || { echo "PYTHON=$python has no tokenizers: pip install tokenizers" >&2; exit 1; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

cat >"$dir/make.py" <<'PY'
import json, subprocess, sys
out, size = sys.argv[1], int(float(sys.argv[2]) * 1e6)
files = [f for f in subprocess.run(["git", "ls-files", "*.rs", "*.md", "*.toml"], capture_output=True, text=True).stdout.split("\n") if f]
texts = [open(f, encoding="utf-8").read() for f in files]
# This program treats spelled-out special tokens as text, the library as tokens.
lines = [json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts if "<|endoftext|>" not in t]
with open(out, "w", encoding="utf-8") as to:
    written = 0
    while written < size:
        for line in lines:
            written += len(line.encode())
            to.write(line)
PY
cat >"$dir/theirs.py" <<'PY'
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
texts = [json.loads(line)["text"] for line in open(sys.argv[2], encoding="utf-8")]
start, tokens = time.perf_counter(), 0
for at in range(0, len(texts), 256):
    tokens += sum(len(e) for e in tokenizer.encode_batch_fast(texts[at : at + 256], add_special_tokens=False))
print(time.perf_counter() - start, tokens)
PY
"$python" "$dir/make.py" "$dir/a.jsonl" "$mb"
"$megatron" tokenizer train --overwrite --input "$dir/a.jsonl" --vocab-size "$vocab" --output "$dir/tokenizer.json" >&2
export RAYON_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

ours=() theirs=()
for _ in $(seq "$rounds"); do
    start=$(date +%s%N)
    said=$(taskset -c "$core" "$megatron" preprocess --overwrite --workers 1 --input "$dir/a.jsonl" --tokenizer "$dir/tokenizer.json" --output-prefix "$dir/x")
    ours+=("$(awk -v a="$start" -v b="$(date +%s%N)" 'BEGIN { print (b - a) / 1e9 }')")
    read -r seconds tokens < <(taskset -c "$core" "$python" "$dir/theirs.py" "$dir/tokenizer.json" "$dir/a.jsonl")
    theirs+=("$seconds")
    grep -q " $tokens tokens" <<<"$said" || { echo "the numbers of tokens differ: $said; $tokens" >&2; exit 1; }
done
bytes=$(stat -c %s "$dir/a.jsonl")
version=$("$python" -c 'import tokenizers; print(tokenizers.__version__)')
echo "$(awk -v b="$bytes" 'BEGIN { printf "%.1f", b / 1e6 }') MB of JSON lines, $tokens tokens, $rounds runs of each on one core"
echo
echo "| | fastest, s | median, s | MB/s |"
echo "| --- | --: | --: | --: |"
row() { # name, times
    printf '%s\n' "${@:2}" | sort -g | awk -v n="$1" -v b="$bytes" '{ x[NR] = $1 } END {
        printf "| %s | %.2f | %.2f | %.1f |\n", n, x[1], x[int((NR + 1) / 2)], b / x[1] / 1e6 }'
}
row "megatron preprocess, whole command" "${ours[@]}"
row "tokenizers $version, encode_batch_fast alone" "${theirs[@]}"

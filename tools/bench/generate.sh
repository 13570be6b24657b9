#!/usr/bin/env bash
# Continues a prompt with a GPT-2 of 124 M parameters, with this program and with Hugging Face
# transformers, in turn, and prints tokens per second in Markdown.
#
#   tools/bench/generate.sh
#   DTYPES=fp32 TOKENS=64 ROUNDS=1 tools/bench/generate.sh
#
# Settings (environment):
#   DTYPES   precisions                         [fp32 bf16]
#   TOKENS   new tokens                         [128]
#   ROUNDS   runs of each, in turn; the medians count [3]
#   THREADS  of each                            [cores]
#   PYTHON   a Python with torch and transformers; without it they are installed in target/bench-venv
# Run it on an idle machine: other programs distort the results.
set -euo pipefail
cd "$(dirname "$0")/../.."

dtypes=${DTYPES:-fp32 bf16}
tokens=${TOKENS:-128}
rounds=${ROUNDS:-3}
threads=${THREADS:-$(nproc)}

if [ -z "${PYTHON:-}" ]; then
    PYTHON=target/bench-venv/bin/python
    if ! "$PYTHON" -c 'import torch, transformers' 2>/dev/null; then
        echo "installing torch and transformers in target/bench-venv" >&2
        python3 -m venv target/bench-venv
        "$PYTHON" -m pip install --quiet torch numpy transformers >&2
    fi
fi
cargo build --release --quiet
megatron=${CARGO_TARGET_DIR:-target}/release/megatron

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$PYTHON" tools/bench/generate_hf.py make "$work/model" >&2

ours() {
    local flags=()
    [ "$1" = fp32 ] || flags=("--$1")
    "$megatron" generate --load "$work/model" --prompt "t1 t2 t3 t4 t5 t6 t7 t8" --num-tokens "$tokens" --temperature 0 --device cpu \
        --threads "$threads" "${flags[@]}" 2>"$work/err" >/dev/null && awk '/ a second/ { print $(NF - 2) }' "$work/err"
}
theirs() {
    "$PYTHON" tools/bench/generate_hf.py run "$work/model" "$1" "$tokens" "$threads" 2>"$work/err"
}
# Records what a run prints; a failed run shows its error.
measure() {
    "$@" >>"$work/$1-$2" || {
        cat "$work/err" >&2
        exit 1
    }
}
for dtype in $dtypes; do
    for _ in $(seq "$rounds"); do
        measure ours "$dtype"
        measure theirs "$dtype"
    done
done

median() { sort -n "$1" | awk '{ v[NR] = $1 } END { print (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2 }'; }
cpu=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
echo "$(date +%F), $(git rev-parse --short HEAD 2>/dev/null || echo 'no commit'), ${cpu:-unknown CPU}, $(nproc) cores, transformers $("$PYTHON" -c 'import transformers, torch; print(transformers.__version__, "on torch", torch.__version__)')"
echo
echo "| GPT-2 124 M | tokens/s there | tokens/s here | ratio |"
echo "| --- | --: | --: | --: |"
for dtype in $dtypes; do
    here=$(median "$work/ours-$dtype") there=$(median "$work/theirs-$dtype")
    awk -v d="$dtype" -v h="$here" -v t="$there" 'BEGIN { printf "| %s | %.1f | %.1f | %.2f |\n", d, t, h, h / t }'
done

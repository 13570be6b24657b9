#!/usr/bin/env bash
# Trains the quickstart in fp32, bf16 (with Adam's moments in bf16 too) and fp16, and prints the
# validation losses and their differences from fp32.
#
#   tools/bench/precision.sh                        about two minutes for each on 2 cores
#
# Settings (environment):
#   FLAGS    further flags of `megatron pretrain`
# An overflow in fp16 skips a step on all ranks, and is counted once.
set -euo pipefail
cd "$(dirname "$0")/../.."
megatron=${CARGO_TARGET_DIR:-target}/release/megatron
[ -x "$megatron" ] || { echo "build first: cargo build --release" >&2; exit 1; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

for dtype in fp32 bf16 bf16-moments fp16; do
    case $dtype in
        fp32) precision=() ;; # what is trained without a flag
        bf16-moments) precision=(--bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16) ;;
        *) precision=("--$dtype") ;;
    esac
    # shellcheck disable=SC2086  # several flags
    "$megatron" pretrain examples/quickstart.toml "${precision[@]}" ${FLAGS:-} --save "$dir/$dtype" --load "$dir/$dtype" \
        --metrics "$dir/$dtype.jsonl" >"$dir/$dtype.log" 2>&1 || { cat "$dir/$dtype.log" >&2; exit 1; }
    skipped=$(grep -c '"skipped":true' "$dir/$dtype.jsonl" || true)
    sed -n 's/.*validation loss at iteration *\([0-9]*\) | lm loss value: *\([^ ]*\).*/\1 \2/p' "$dir/$dtype.log" |
        sed "s/^/$dtype $skipped /" >>"$dir/losses"
done
echo "| | iteration | validation loss | from fp32, % | skipped steps of the run |"
echo "| --- | --: | --: | --: | --: |"
awk '{
    if ($1 == "fp32") of[$3] = $4
    printf "| %s | %d | %.4f | %+.2f | %d |\n", $1, $3, $4, 100 * ($4 / of[$3] - 1), $2
}' "$dir/losses"

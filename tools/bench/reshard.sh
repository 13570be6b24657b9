#!/usr/bin/env bash
# Reshards a checkpoint of about 4 GB and copies the same files with cp and fsync, alternating;
# prints times and memory in Markdown.
#
#   tools/bench/reshard.sh                                   tp 1 · dp 1 to tp 4 · pp 3 · dp 2 with ZeRO-1
#   ROUNDS=5 TO="--tensor-model-parallel-size 2" tools/bench/reshard.sh
#
# Settings (environment):
#   TO        the layout to reshard to, as flags of `megatron reshard`
#   LAYERS    layers of the model, 1.4 GB each with Adam's state     [3]
#   ROUNDS    runs of each; the median counts                        [3]
#   DIR       where files are made and removed again; needs 3 times the checkpoint's size  [target/bench-reshard]
# Run it on an idle machine: other programs distort the results. Recently read files are in the page
# cache for both.
set -euo pipefail
cd "$(dirname "$0")/../.."

to=${TO:---tensor-model-parallel-size 4 --pipeline-model-parallel-size 3 --data-parallel-size 2 --use-distributed-optimizer}
layers=${LAYERS:-3}
rounds=${ROUNDS:-3}
dir=${DIR:-target/bench-reshard}
megatron=$(realpath -m "${CARGO_TARGET_DIR:-target}/release/megatron")

[ -x "$megatron" ] || { echo "build first: cargo build --release" >&2; exit 1; }
[ ! -e "$dir" ] || { echo "$dir is in the way" >&2; exit 1; }
mkdir -p "$dir"
trap 'rm -rf "$dir"' EXIT

{ yes 'A text that says little, again and again.' || true; } | head -c 100000 >"$dir/text.txt"
# One step, so that Adam's moments are not zero.
"$megatron" pretrain --num-layers "$layers" --hidden-size 2048 --ffn-hidden-size 16384 --swiglu --num-attention-heads 16 \
    --disable-bias-linear --seq-length 16 --data-path "$dir/text.txt" --tokenizer byte --cache-dir "$dir/cache" \
    --micro-batch-size 1 --train-iters 1 --lr 1e-4 --eval-iters 0 --save "$dir/from" >&2
bytes=$(du -sb "$dir/from" | cut -f1)

now() { date +%s%N; }
seconds() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.2f", (b - a) / 1e9 }'; }
median() { printf '%s\n' "$@" | sort -g | awk '{ x[NR] = $1 } END { print x[int((NR + 1) / 2)] }'; }

copies=() reshards=() peak=0
for _ in $(seq "$rounds"); do
    sync
    start=$(now)
    cp -r "$dir/from" "$dir/copy"
    find "$dir/copy" -type f -exec sync {} +
    copies+=("$(seconds "$start" "$(now)")")
    rm -rf "$dir/copy"

    sync
    start=$(now)
    # shellcheck disable=SC2086  # several flags
    "$megatron" reshard "$dir/from" "$dir/to" $to >/dev/null &
    pid=$!
    # The high-water mark only rises, so the last sample misses only growth in the last moments.
    while mark=$(awk '/^VmHWM/ { print $2 }' "/proc/$pid/status" 2>/dev/null) && [ -n "$mark" ]; do
        if [ "$mark" -gt "$peak" ]; then peak=$mark; fi
        sleep 0.05
    done
    wait "$pid"
    reshards+=("$(seconds "$start" "$(now)")")
    rm -rf "$dir/to"
done

copy=$(median "${copies[@]}")
reshard=$(median "${reshards[@]}")
echo "checkpoint of $(awk -v b="$bytes" 'BEGIN { printf "%.2f", b / 1e9 }') GB to $to; medians of $rounds runs"
echo
echo "| | s | GB/s | times cp | peak memory |"
echo "| --- | --: | --: | --: | --: |"
awk -v c="$copy" -v r="$reshard" -v b="$bytes" -v p="$peak" 'BEGIN {
    printf "| cp -r, fsync | %.2f | %.2f | 1.00 | |\n", c, b / c / 1e9
    printf "| reshard | %.2f | %.2f | %.2f | %.0f MB |\n", r, b / r / 1e9, r / c, p / 1000
}'

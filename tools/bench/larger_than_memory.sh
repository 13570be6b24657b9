#!/usr/bin/env bash
# Trains a GPT of 1.3 B parameters over two data-parallel ranks with weights, gradients and optimizer
# state in files (ZeRO-3 and ZeRO-Infinity), and compares its steps with the time that the disk alone
# would take. First a small GPT with the same settings shows that the files change no bit.
#
#   cargo build --release && tools/bench/larger_than_memory.sh      # 25 GB of disk, 15 minutes
#
# Settings (environment):
#   DIR      folder on the disk to use                              [target/offload]
#   STEPS    steps                                                  [4]
#   SIZE     layers, width, heads                                   [24 2048 16]
#   FLAGS    more flags of `megatron pretrain`, e.g. --bf16
#
# The disk's time: the bytes that the ranks really read and wrote (/proc/PID/io), at the rates of two
# streams past the page cache, measured before and after the steps.
set -euo pipefail
cd "$(dirname "$0")/../.."
megatron=${CARGO_TARGET_DIR:-target}/release/megatron
[ -x "$megatron" ] || { echo "build first: cargo build --release" >&2; exit 1; }
mkdir -p "${DIR:=target/offload}"
dir=$(mktemp -d -p "$DIR")
trap 'kill "${pid:-}" 2>/dev/null || true; rm -rf "$dir"' EXIT
steps=${STEPS:-4}

pretrain() { # metrics, layers, width, heads, flags
    # shellcheck disable=SC2086  # several flags
    "$megatron" pretrain --mock-data --vocab-size 50304 --num-layers "$2" --hidden-size "$3" --num-attention-heads "$4" \
        --seq-length 512 --micro-batch-size 1 --data-parallel-size 2 --zero-stage 3 --recompute-granularity full \
        --recompute-method uniform --recompute-num-layers 1 --lr 1e-4 --lr-decay-style constant --eval-iters 0 --log-interval 1 \
        --train-iters "$steps" --cache-dir "$dir/cache" --metrics "$dir/$1.jsonl" "${@:5}" ${FLAGS:-} >"$dir/$1.log" 2>&1
}
failed() { cat "$dir/$1.log" >&2; exit 1; }
files=(--offload-param nvme --offload-optimizer nvme --nvme-path "$dir/state")
bits() { grep -o '"\(iteration\|lm_loss\|grad_norm\)":[^,}]*' "$dir/$1.jsonl"; }

pretrain memory 4 256 4 || failed memory
pretrain files 4 256 4 "${files[@]}" || failed files
cmp <(bits memory) <(bits files) || { echo "files change the losses of a small GPT" >&2; exit 1; }
echo "a small GPT: losses and norms of $steps steps have equal bits with and without files"

# The disk's rate in bytes per second, of two streams of 2 GiB: rate read|write
rate() {
    local start end
    start=$(date +%s.%N)
    for stream in 1 2; do
        if [ "$1" = write ]; then
            dd if=/dev/zero of="$dir/stream$stream" bs=4M count=512 oflag=direct status=none &
            streams[stream]=$!
        else
            dd if="$dir/stream$stream" of=/dev/null bs=4M iflag=direct status=none &
            streams[stream]=$!
        fi
    done
    wait "${streams[@]}"
    end=$(date +%s.%N)
    awk -v start="$start" -v end="$end" 'BEGIN { printf "%.0f\n", 2 * 2 ^ 31 / (end - start) }'
}
rates() {
    echo "write $(rate write)" >>"$dir/rates"
    echo "read $(rate read)" >>"$dir/rates"
    rm "$dir"/stream?
}
# Bytes read and written so far by the ranks: children of the program, which the shell $pid started.
moved() {
    local program rank
    program=$(pgrep -P "$pid" | head -n 1)
    for rank in $(pgrep -P "$program"); do cat "/proc/$rank/io" 2>/dev/null || true; done |
        awk '/^read_bytes/ { read += $2 } /^write_bytes/ { written += $2 } END { print read + 0, written + 0 }'
}

# shellcheck disable=SC2086  # three numbers
set -- ${SIZE:-24 2048 16}
rates
pretrain large "$1" "$2" "$3" "${files[@]}" &
pid=$!
for step in $(seq "$steps"); do
    while [ "$(cat "$dir/large.jsonl" 2>/dev/null | grep -c '"lm_loss"' || true)" -lt "$step" ]; do
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.2
    done
    echo "$step $(moved) $(date +%s.%N)" >>"$dir/moved"
done
wait "$pid" || failed large
rates
grep -E 'parameters|^peak memory' "$dir/large.log" || true
echo "| step | seconds | GB read | GB written | the disk's seconds | ratio |"
echo "| --- | --: | --: | --: | --: | --: |"
awk '
    FILENAME ~ /rates$/ { sum[$1] += $2; n[$1]++; next }
    NR > 0 && before != "" {
        disk = ($2 - read) / (sum["read"] / n["read"]) + ($3 - written) / (sum["write"] / n["write"])
        printf "| %d | %.1f | %.1f | %.1f | %.1f | %.2f |\n", $1, $4 - before, ($2 - read) / 1e9, ($3 - written) / 1e9, disk, ($4 - before) / disk
    }
    { read = $2; written = $3; before = $4 }
    END { printf "rates: %.0f MB/s read, %.0f MB/s written\n", sum["read"] / n["read"] / 1e6, sum["write"] / n["write"] / 1e6 }
' "$dir/rates" "$dir/moved"

#!/usr/bin/env bash
# Measures how long checkpoints delay training: a GPT of 86 M parameters (1 GB per checkpoint)
# trains 16 steps without checkpoints, with one every 5 steps that it waits for, and with
# --async-save. The measured time is from the end of the first step to the end of the last; three
# checkpoints are saved in it.
#
#   tools/bench/save.sh                             a minute or two on 2 cores
#
# Settings (environment):
#   FLAGS    further flags of `megatron pretrain`
#   ROUNDS   how often each is run, in turn; the fastest counts (2)
#   DIR      where checkpoints go (a temporary folder)
set -euo pipefail
cd "$(dirname "$0")/../.."
megatron=${CARGO_TARGET_DIR:-target}/release/megatron
[ -x "$megatron" ] || { echo "build first: cargo build --release" >&2; exit 1; }
dir=$(mktemp -d ${DIR:+-p "$DIR"})
trap 'rm -rf "$dir"' EXIT

run() { # name, flags
    rm -rf "$dir/saved"
    # shellcheck disable=SC2086  # several flags
    "$megatron" pretrain --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 256 --micro-batch-size 4 --bf16 --lr 1e-4 \
        --lr-decay-style constant --data-path docs --tokenizer byte --cache-dir "$dir/cache" --train-iters 16 --eval-iters 0 --log-interval 1 \
        "${@:2}" ${FLAGS:-} >"$dir/log" 2>&1 || { cat "$dir/log" >&2; exit 1; }
    local memory
    memory=$(sed -n 's/^peak memory: \([0-9.]*\) GiB.*/\1/p' "$dir/log")
    sed -n 's/^ \[\([^]]*\)\] iteration .*/\1/p' "$dir/log" | sed -n '1p;$p' | xargs -d '\n' -n1 date +%s.%N -d |
        paste -sd' ' | awk -v name="$1" -v memory="$memory" '{print name, $2 - $1, memory}' >>"$dir/times"
}
for _ in $(seq "${ROUNDS:-2}"); do
    run none
    run waits --save "$dir/saved" --save-interval 5
    run async --save "$dir/saved" --save-interval 5 --async-save
done
echo "| checkpoints | seconds of 15 steps | held up by each, s | peak GiB of a rank |"
echo "| --- | --: | --: | --: |"
awk '{ if (!($1 in best) || $2 < best[$1]) { best[$1] = $2; memory[$1] = $3 } }
    END { n = split("none waits async", names, " ")
        for (i = 1; i <= n; i++) { k = names[i]
            printf "| %s | %.2f | %s | %s |\n", k, best[k], k == "none" ? "" : sprintf("%.2f", (best[k] - best["none"]) / 3), memory[k] } }' "$dir/times"

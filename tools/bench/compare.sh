#!/usr/bin/env bash
# Runs training steps of the same shapes in PyTorch and in this program, one after the other, and
# prints a Markdown table of ratios.
#
#   tools/bench/compare.sh                       all presets on all cores, and on two ranks beside two data-parallel ones there
#   PRESETS=small STEPS=20 tools/bench/compare.sh
#
# Settings (environment):
#   PRESETS   presets to run                                         [small llama-small gpt2-124m]
#   DTYPES    precisions to run: fp32, bf16 (there by autocast)      [fp32]
#   STEPS     timed steps of a run                                   [12]
#   ROUNDS    runs of each, alternating; the median counts           [3]
#   THREADS   threads of a run of one rank, 0: no such run            [cores]
#   RANKS     ranks of the second comparison, 0: none                [2]
#   LAYOUTS   layouts of these ranks: dp, tp (with sp), pp, cp,          [dp tp pp]
#             zero2, zero3 (dp with that stage; dp itself is ZeRO-1)
#             (PyTorch is data parallel on the same global batch)
#   MICRO     samples per forward pass of one rank                    [8; gpt2-124m: 2]
#   FSDP      1: PyTorch's ranks shard their model (fully_shard) instead of DDP
#   FLAGS     more flags for this program, e.g. --offload-optimizer-nvme-path target/offload
#   COMPILE   1: also run torch.compile (needs a C++ compiler); the faster one counts
#   PYTHON    a Python with torch; without it a virtual environment is created in target/bench-venv
#   TORCH     packages to install there                              [torch numpy]
# Run it on an idle machine: other programs distort the results.
set -euo pipefail
cd "$(dirname "$0")/../.."

presets=${PRESETS:-small llama-small gpt2-124m}
dtypes=${DTYPES:-fp32}
steps=${STEPS:-12}
rounds=${ROUNDS:-3}
cores=$(nproc)
threads=${THREADS:-$cores}
ranks=${RANKS:-2}
layouts=${LAYOUTS:-dp tp pp}

say() { echo "$*" >&2; }

if [ -z "${PYTHON:-}" ]; then
    PYTHON=target/bench-venv/bin/python
    if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
        say "installing ${TORCH:-torch numpy} in target/bench-venv"
        python3 -m venv target/bench-venv
        # shellcheck disable=SC2086  # several packages or options
        "$PYTHON" -m pip install --quiet ${TORCH:-torch numpy} >&2
    fi
fi
load=$(cut -d' ' -f1 /proc/loadavg 2>/dev/null || echo 0)
if awk -v load="$load" 'BEGIN { exit !(load > 0.5) }'; then
    say "warning: the load average is $load; something else runs here, and the figures will tell of it, too"
fi
cargo build --release --quiet
megatron=${CARGO_TARGET_DIR:-target}/release/megatron

results=$(mktemp)
trap 'rm -f "$results"' EXIT

failed=0
# Runs a command and records its results under KEY and WHO. A failed run is repeated once (gloo
# sometimes aborts when its processes end). If it fails again, it is missing from the table, and
# the script ends with an error.
measure() {
    local key=$1 who=$2 line # key: preset|dtype|ranks × threads
    shift 2
    for _ in 1 2; do
        if line=$("$@" | grep tokens_per_second=); then
            say "$line"
            echo "$key|$who|$line" >> "$results"
            return
        fi
        say "failed: $*"
    done
    failed=1
}

for preset in $presets; do for dtype in $dtypes; do
    # fp32 is what `megatron bench step` runs without a flag.
    [ "$dtype" = fp32 ] && precision=() || precision=("--$dtype")
    # Samples per step of one rank, in PyTorch and in this program.
    case $preset in gpt2-124m) micro=${MICRO:-2} ;; *) micro=${MICRO:-8} ;; esac
    # The output matrix costs as much as two layers of the small presets, so stage 0 gets four of
    # the six layers, and a microbatch takes long in the last stage.
    stages=(--pipeline-partition flops --delay-wgrad-compute --pipeline-extra-warmup 2)
    for _ in $(seq "$rounds"); do
        key="$preset|$dtype|1 × $threads"
        peer=("$PYTHON" tools/bench/torch_gpt.py --preset "$preset" --dtype "$dtype" --steps "$steps" --micro-batch-size "$micro")
        # shellcheck disable=SC2206  # several flags
        ours=("$megatron" bench step --preset "$preset" "${precision[@]}" --steps "$steps" ${FLAGS:-})
        if [ "$threads" -gt 0 ]; then
            measure "$key" eager "${peer[@]}" --threads "$threads"
            [ "${COMPILE:-0}" = 0 ] || measure "$key" compiled "${peer[@]}" --threads "$threads" --compile 1
            measure "$key" ours "${ours[@]}" --threads "$threads" --micro-batch-size "$micro"
        fi
        [ "$ranks" -gt 1 ] || continue
        each=$((cores / ranks > 0 ? cores / ranks : 1))
        key="$preset|$dtype|$ranks × $each"
        # `megatron launch` sets the variables that torchrun sets.
        there=("$megatron" launch --nproc-per-node "$ranks" -- "${peer[@]}" --threads "$each")
        if [ "${FSDP:-0}" = 1 ]; then
            measure "$key" fsdp "${there[@]}" --fsdp 1
        else
            measure "$key" eager "${there[@]}"
            [ "${COMPILE:-0}" = 0 ] || measure "$key" compiled "${there[@]}" --compile 1
        fi
        samples=(--global-batch-size $((micro * ranks)))
        batch=("${samples[@]}" --micro-batch-size "$micro")
        for layout in $layouts; do
            case $layout in
                dp) flags=(--data-parallel-size "$ranks" "${batch[@]}") ;;
                zero2 | zero3) flags=(--data-parallel-size "$ranks" "${batch[@]}" --zero-stage "${layout#zero}") ;;
                tp) flags=(--tensor-model-parallel-size "$ranks" --sequence-parallel "${batch[@]}") ;;
                cp) flags=(--context-parallel-size "$ranks" "${batch[@]}") ;;
                # Enough microbatches to fill the pipeline.
                pp) flags=(--pipeline-model-parallel-size "$ranks" "${samples[@]}" --micro-batch-size $((micro / 4 > 0 ? micro / 4 : 1)) "${stages[@]}") ;;
                *) say "LAYOUTS: \"$layout\" is none of dp, zero2, zero3, tp, pp, cp"; exit 2 ;;
            esac
            measure "$key" "$layout" "${ours[@]}" --threads "$each" "${flags[@]}"
        done
    done
done; done

processor=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1)
commit=$(git describe --always --dirty 2>/dev/null || echo "no commit")
torch=$("$PYTHON" -c 'import torch; print("torch", torch.__version__)')
echo "$(date -u +%F), $commit, $processor, $cores cores, $torch"
echo "medians of $rounds runs of $steps steps; ratio: tokens a second here / there; memory: peak here / there"
echo
awk -F'|' '
    function value(name) {
        match($0, name "=[0-9.]+")
        return substr($0, RSTART + length(name) + 1, RLENGTH - length(name) - 1)
    }
    function median(list,   parts, n, i, j, t) {
        n = split(list, parts, " ")
        for (i = 2; i <= n; i++) for (j = i; j > 1 && parts[j] + 0 < parts[j - 1] + 0; j--) {
            t = parts[j]; parts[j] = parts[j - 1]; parts[j - 1] = t
        }
        return n % 2 ? parts[(n + 1) / 2] : (parts[n / 2] + parts[n / 2 + 1]) / 2
    }
    {
        key = "| " $1 " | " $2 " | " $3 " |"; who = $4
        if (!(key in seen)) { seen[key] = 1; order[++rows] = key }
        rate[key, who] = rate[key, who] " " value("tokens_per_second")
        flops[key, who] = flops[key, who] " " value("tflops") * 1e3
        peak[key, who] = peak[key, who] " " value("peak_gib")
    }
    END {
        print "| preset | dtype | ranks × threads | here | peer | tokens/s | tokens/s here | GFLOP/s here | ratio | GiB | GiB here | memory |"
        print "| --- | --- | --: | --- | --- | --: | --: | --: | --: | --: | --: | --: |"
        num_peers = split("eager compiled fsdp", peers, " ")
        num_here = split("ours dp zero2 zero3 tp pp cp", kinds, " ")
        for (row = 1; row <= rows; row++) {
            key = order[row]
            # The faster PyTorch variant counts.
            peer = ""
            for (p = 1; p <= num_peers; p++) if ((key, peers[p]) in rate)
                if (peer == "" || median(rate[key, peers[p]]) > median(rate[key, peer])) peer = peers[p]
            if (peer == "") continue
            for (k = 1; k <= num_here; k++) if ((key, kinds[k]) in rate) {
                there = median(rate[key, peer]); here = median(rate[key, kinds[k]])
                gib = median(peak[key, peer]); gib_here = median(peak[key, kinds[k]])
                printf "%s %s | torch %s | %.0f | %.0f | %.0f | %.2f | %.2f | %.2f | %.2f |\n", key, kinds[k] == "ours" ? "" : kinds[k], peer,
                    there, here, median(flops[key, kinds[k]]), here / there, gib, gib_here, gib_here / gib
            }
        }
    }' "$results"
exit "$failed"

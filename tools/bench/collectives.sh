#!/usr/bin/env bash
# Times collectives between ranks on this machine with this program, with gloo (PyTorch) and, if
# mpicc exists, with the installed MPI, in turn. Prints a Markdown table of the best times and their
# ratios.
#
#   PYTHON=venv/bin/python tools/bench/collectives.sh
#   PYTHON=venv/bin/python RANKS=4 DTYPE=bf16 SIZES=4096,1048576 tools/bench/collectives.sh
#
# Settings (environment):
#   RANKS    ranks                                            [2]
#   DTYPE    f32 or bf16 (MPI: f32 alone)                     [f32]
#   SIZES    bytes of the larger buffer of an operation       [4096,1048576,4194304,16777216,67108864]
#   BACKEND  backend of this program                          [local]
#   ROUNDS   runs of each, in turn; the best counts           [3]
#   MS       milliseconds for each operation, size and run    [300]
#   PYTHON   a Python with torch; without it there is no gloo column
# Run it on an idle machine: other programs distort the results.
set -euo pipefail
cd "$(dirname "$0")/../.."

ranks=${RANKS:-2}
dtype=${DTYPE:-f32}
sizes=${SIZES:-4096,1048576,4194304,16777216,67108864}
backend=${BACKEND:-local}
rounds=${ROUNDS:-3}
ms=${MS:-300}
seconds=$(awk -v ms="$ms" 'BEGIN { print ms / 1000 }')

cargo build --release --quiet >&2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

ours() {
    # Rows of the table: | operation | size | µs | fastest | GB/s | bus GB/s |
    "${CARGO_TARGET_DIR:-target}/release/megatron" bench collectives --ranks "$ranks" --backend "$backend" --dtype "$dtype" --sizes "$sizes" \
        --milliseconds "$ms" | awk -F'|' '$3 + 0 > 0 { gsub(/ /, ""); print $2, $3, $5 }'
}
gloo() {
    if [ -n "${PYTHON:-}" ]; then
        "$PYTHON" tools/bench/collectives_torch.py "$ranks" "$dtype" "$sizes" "$seconds" 2>"$work/gloo.err" || cat "$work/gloo.err" >&2
    fi
}
mpi() {
    if [ -x "$work/mpi" ]; then
        # Ranks that share cores must not spin.
        local yield=0
        if [ "$ranks" -gt "$(nproc)" ]; then yield=1; fi
        OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe --mca mpi_yield_when_idle "$yield" \
            -n "$ranks" "$work/mpi" "$seconds" ${sizes//,/ } 2>"$work/mpi.err" || cat "$work/mpi.err" >&2
    fi
}

if [ "$dtype" = f32 ] && command -v mpicc >/dev/null; then
    mpicc -O2 tools/bench/collectives_mpi.c -o "$work/mpi"
fi
for _ in $(seq "$rounds"); do
    for who in ours gloo mpi; do
        "$who" | sed "s/^/$who /" >>"$work/times"
    done
done

echo "machine: $(awk -F': ' '/model name/ { print $2; exit }' /proc/cpuinfo), $(nproc) cores, load $(cut -d' ' -f1 /proc/loadavg);" \
    "$ranks ranks, $dtype, $backend backend; best of $rounds runs in turn"
echo
awk '
    function value(who, key) { return (who, key) in best ? best[who, key] : 0 }
    { key = $2 " " $3
      if (!(key in seen)) { seen[key] = 1; keys[++n] = key }
      if (!(($1, key) in best) || $4 < best[$1, key]) best[$1, key] = $4 }
    END {
        print "| operation | bytes | µs | GB/s | gloo µs | gloo / ours | MPI µs | MPI / ours |"
        print "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
        for (i = 1; i <= n; i++) {
            split(keys[i], part, " ")
            ours = value("ours", keys[i]); gloo = value("gloo", keys[i]); mpi = value("mpi", keys[i])
            printf "| %s | %s | %.4g | %.3g |", part[1], part[2], ours, part[2] / ours / 1000
            if (gloo) printf " %.4g | %.2f |", gloo, gloo / ours; else printf " | |"
            if (mpi) printf " %.4g | %.2f |\n", mpi, mpi / ours; else printf " | |\n"
        }
    }' "$work/times"

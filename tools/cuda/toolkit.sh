#!/usr/bin/env bash
# Creates a CUDA 13 toolkit in DIR from NVIDIA's packages on PyPI. It is enough to build
# `--features cuda` on a machine without a GPU, driver or CUDA installation, and to run on a machine
# with a GPU and a driver.
#
#   tools/cuda/toolkit.sh DIR      # about 2 GB; does nothing if DIR is complete
#   source DIR/env.sh              # CUDA_HOME, PATH and where compilers and linkers look
#   cargo build --release --features cuda
#
# Needs python3 with venv, gcc and g++. If NVIDIA's own toolkit is installed, this is not needed:
# set CUDA_HOME.
set -euo pipefail

if [[ $# -ne 1 || $1 == -* ]]; then
  echo "usage: $0 DIR    (see the first lines of this file)" >&2
  exit 2
fi
for tool in python3 gcc g++; do
  command -v "$tool" >/dev/null || { echo "$0: needs $tool; install it first" >&2; exit 1; }
done

mkdir -p "$1"
dir=$(cd "$1" && pwd)
if [[ -f $dir/env.sh ]]; then
  echo "complete; now: source $dir/env.sh"
  exit 0
fi

python3 -m venv "$dir/venv" || { echo "$0: python3 has no venv; on Debian: apt-get install python3-venv" >&2; exit 1; }
"$dir/venv/bin/pip" install --quiet --disable-pip-version-check \
  'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-cccl==13.0.*' \
  'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-nvrtc==13.0.*' 'nvidia-cublas==13.*' 'nvidia-curand==10.*' 'nvidia-nccl-cu13==2.*'
packages=("$dir"/venv/lib/python3*/site-packages/nvidia)
cuda=${packages[0]}/cu13 nccl=${packages[0]}/nccl

# The layout of an installed toolkit: bin, include, nvvm, lib64, lib64/stubs.
for part in bin include nvvm; do
  ln -sfn "$cuda/$part" "$dir/$part"
done
mkdir -p "$dir/lib64/stubs"
for library in "$cuda"/lib/*.so.* "$nccl"/lib/*.so.*; do
  file=${library##*/}
  ln -sf "$library" "$dir/lib64/$file"
  ln -sf "$library" "$dir/lib64/${file%%.so.*}.so" # what -l looks for
done
ln -sf "$cuda"/lib/*.a "$dir/lib64/"
ln -sf "$nccl/include/nccl.h" "$dir/nccl.h"

# Linking needs a libcuda, which comes only with the driver. This one has only the symbol names.
grep -ohE '\bcu[A-Z][A-Za-z0-9]*(_v[0-9]+)?(_pt[ds][sz])?\b' "$cuda/include/cuda.h" | sort -u |
  sed 's/.*/void &(void) {}/' >"$dir/libcuda.c"
gcc -w -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$dir/lib64/stubs/libcuda.so" "$dir/libcuda.c"

"$dir/bin/nvcc" --version | tail -n 2
# Written last: it marks the directory as complete.
cat >"$dir/env.sh" <<END
export CUDA_HOME=$dir
export CUDA_COMPUTE_CAP=\${CUDA_COMPUTE_CAP:-80} # of candle's own kernels, which later GPUs' drivers translate; those for 90 would run on Hopper alone
export PATH=$dir/bin:\$PATH
export CUDAFORGE_THREADS=\${CUDAFORGE_THREADS:-\$(nproc)} # candle's kernels compile on half of the cores otherwise
export LIBRARY_PATH=$dir/lib64:$dir/lib64/stubs\${LIBRARY_PATH:+:\$LIBRARY_PATH}
export CPATH=$dir/include:$nccl/include\${CPATH:+:\$CPATH}
END
echo "complete; now: source $dir/env.sh"

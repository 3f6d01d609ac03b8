#!/usr/bin/env bash
# Provides nvcc for the build. An installed CUDA toolkit is used; otherwise pinned wheels go to .cuda/ (git-ignored):
# about 105 MB to download, 270 MB on disk, no root. NVIDIA's CUDA licence applies to them. With --cublas also cuBLASLt,
# which the binary looks for at run time and every full toolkit has: 423 MB more to download, 600 MB on disk.
set -euo pipefail
cd "$(dirname "$0")/.."

for nvcc in "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
    if [[ -x "$nvcc" && "${1:-}" != --wheels && "${1:-}" != --cublas ]]; then
        echo "using $nvcc; tools/setup-cuda.sh --wheels installs the pinned wheels all the same"
        exit
    fi
done

# 13.0 is what driver 580 speaks; the wheels of a newer 13.x would ask for a newer driver.
wheels=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85)
[[ "${1:-}" == --cublas ]] && wheels+=(nvidia-cublas==13.1.0.3)
stamp=.cuda/wheels.txt
if [[ -f "$stamp" && "$(cat "$stamp")" == "${wheels[*]}"* ]]; then
    echo ".cuda is up to date"
    exit
fi
rm -rf .cuda
python3 -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --only-binary=:all: \
    --target .cuda "${wheels[@]}"
.cuda/nvidia/cu13/bin/nvcc --version | tail -n 2
# Cargo cannot watch for a file that is not there yet.
touch pegainfer-kernels/build/main.rs
echo "${wheels[*]}" >"$stamp"

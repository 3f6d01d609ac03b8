#!/usr/bin/env bash
# Provides a Python with Triton for `cargo build --features triton`: a virtual environment in .triton/
# (git-ignored), 188 MB to download, 640 MB on disk; no torch, no GPU. Only the build wants it, not the binary.
set -euo pipefail
cd "$(dirname "$0")/.."

# The launcher is written for the output of 3.6; triton/compile.py refuses other versions.
wheel=triton==3.6.0
stamp=.triton/wheel.txt
if [[ -f "$stamp" && "$(cat "$stamp")" == "$wheel" ]]; then
    echo ".triton is up to date"
    exit
fi
rm -rf .triton
python3 -m venv .triton
.triton/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --only-binary=:all: "$wheel"
.triton/bin/python -c 'import triton; print("Triton", triton.__version__)'
# Cargo cannot watch for a file that is not there yet.
touch pegainfer-kernels/build/main.rs
echo "$wheel" >"$stamp"

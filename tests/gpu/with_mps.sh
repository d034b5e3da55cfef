#!/usr/bin/env bash
# Runs a command with an MPS daemon of its own, so that the kernels of several processes really run at the same time.
set -euo pipefail
CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
finish() {
  echo quit | nvidia-cuda-mps-control >/dev/null 2>&1 || true
  rm -rf "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
}
trap finish EXIT
nvidia-cuda-mps-control -d
"$@"

#!/bin/sh
# Serves one variant of this deployment from Triton server with TensorRT-LLM 1.3.0rc29:
#   serve-triton.sh [autoregressive|dflash] [options of tritonserver]
#
# TensorRT-LLM's own Triton model (model.py, helpers.py) is not in this folder: it has to be that of
# the TensorRT-LLM which runs it. LLMAPI says where it lies: triton_backend/all_models/llmapi of
# TensorRT-LLM's sources at tag v1.3.0rc29; some containers have it at /app/all_models/llmapi.
set -eu
fail() { echo "error: $1" >&2; exit 1; }

here=$(cd "$(dirname "$0")" && pwd)
variant=${1:-dflash}
[ $# -eq 0 ] || shift
llmapi=${LLMAPI:-/app/all_models/llmapi}

[ -d "$here/triton/$variant" ] || fail "there is no variant '$variant', but autoregressive, dflash"
[ -f "$llmapi/tensorrt_llm/1/model.py" ] || fail "$llmapi has no TensorRT-LLM model; set LLMAPI to\
 triton_backend/all_models/llmapi of TensorRT-LLM v1.3.0rc29"
command -v trtllm-llmapi-launch >/dev/null || fail "there is no trtllm-llmapi-launch, which comes\
 with TensorRT-LLM; run this where TensorRT-LLM v1.3.0rc29 is installed"
python3 "$here/preflight.py" "$variant" >&2 || exit 1

repository=$(mktemp -d)
cp -R "$here/triton/$variant/." "$repository"
cp "$llmapi"/tensorrt_llm/1/*.py "$repository/tensorrt_llm/1/"
# What would let a client register memory, write files or unload models is closed to everybody.
closed="shared-memory,trace,logging,model-repository:dflash-trt=$(cat /proc/sys/kernel/random/uuid)"
export TRTLLM_ENABLE_PDL="${TRTLLM_ENABLE_PDL:-1}"  # the same for every variant
# The LLM API starts its workers through MPI, which plain tritonserver cannot.
exec trtllm-llmapi-launch tritonserver --model-repository="$repository" \
    --http-restricted-api="$closed" --grpc-restricted-protocol="$closed" \
    --http-address=127.0.0.1 --grpc-address=127.0.0.1 --metrics-address=127.0.0.1 "$@"

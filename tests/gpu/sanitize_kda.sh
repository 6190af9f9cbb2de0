#!/usr/bin/env bash
# KDA forward and backward under NVIDIA's checkers: memory accesses, then races in shared memory.
#
#     tests/gpu/sanitize_kda.sh [HEADS TOKENS]    # 2 heads, 256 tokens in three documents, cut into single chunks
#
# Each checker has LIMIT seconds (100). The exit status is that of the first one that finds something.
set -euo pipefail
cd "$(dirname "$0")/../.."
for tool in memcheck racecheck; do
    echo "$tool"
    timeout "${LIMIT:-100}" compute-sanitizer --tool "$tool" --print-limit 20 --error-exitcode 9 \
        "${PYTHON:-python}" tests/gpu/run_kda.py once "${1:-2}" "${2:-256}"
done

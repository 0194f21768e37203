#!/usr/bin/env bash
# Runs the numerical proofs of the tree; prints PASS or FAIL last.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
build=${PITH_BUILD_DIR:-build}
status=0
./pith test core operators engine resume || status=1
if [ -e /dev/nvidiactl ] && [ -x "$build/test_gpu" ]; then
  "$build/test_gpu" || status=1
else
  echo "note: no GPU here; CUDA kernels were not run"
fi
if [ $status = 0 ]; then echo PASS; else echo FAIL; fi
exit $status

#!/usr/bin/env bash
# check.sh NAME: does the operator NAME have its contract, reference, kernel and proof, and do its tests pass?
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
name=${1:?usage: check.sh NAME (for example swiglu)}
build=${PITH_BUILD_DIR:-build}
status=0
need() { [ -e "$1" ] || { echo "missing: $1 ($2)"; status=1; }; }
need "operators/$name.h" "contract"
need "operators/$name.cpp" "autograd and CPU reference"
need "tests/operators/${name}_test.cpp" "finite differences, odd shapes, errors"
if [ -e "operators/$name.cu" ]; then
  need "tests/gpu/${name}_gpu_test.cpp" "CUDA against CPU"
  if grep -nE '#include <(ATen|torch|c10)/' "operators/$name.cu"; then
    echo "operators/$name.cu includes LibTorch headers"
    status=1
  fi
fi
grep -q check_gradients "tests/operators/${name}_test.cpp" 2>/dev/null ||
  { echo "the test does not compare with finite differences (check_gradients)"; status=1; }
if [ $status = 0 ]; then
  ./pith build test_operators || status=1
  camel=$(sed -E 's/(^|_)([a-z])/\U\2/g' <<<"$name")
  out=$("$build/test_operators" --gtest_filter="*$camel*" 2>&1) || status=1
  tail -n 5 <<<"$out"
  grep -qE '\[==========\] [1-9][0-9]* tests? from' <<<"$out" || { echo "no test named *$camel* ran"; status=1; }
fi
if [ $status = 0 ]; then echo PASS; else echo FAIL; fi
exit $status

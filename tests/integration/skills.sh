#!/usr/bin/env bash
# The check scripts of the skills choose-layout and debug-hang, where they pass and where they fail.
set -u
failures=0
fail() { echo "FAIL: $*: $(cat log)"; failures=$((failures + 1)); }
skills=$PITH_SOURCE_DIR/.agents/skills
unset MPIRUN
expect() {  # expect STATUS PATTERN COMMAND...: PASS or FAIL in the last line goes with the status
  local wanted=$1 pattern=$2 status=0
  shift 2
  "$@" >log 2>&1 || status=$?
  [ $status -eq "$wanted" ] || fail "exit $status of $*"
  grep -qE "$pattern" log || fail "no '$pattern' from $*"
  [ "$(tail -n 1 log)" = "$([ "$wanted" -eq 0 ] && echo PASS || echo FAIL)" ] || fail "last line of $*"
}

cat >run.toml <<TOML
[model]
config = "$PITH_SOURCE_DIR/examples/qwen3_30b_a3b/config.json"
[data]
train = "none"
[training]
global_batch = 64
TOML
choose() { "$skills/choose-layout/check.sh" "$PWD/run.toml" "$@"; }
expect 0 '^recompute = "none"' choose 8 141
expect 0 '^weights = "reshard"' choose 16 80
expect 1 'none of [0-9]+ layouts fits; the smallest: [0-9.]+ GiB' choose 2 80
expect 1 'no layout is possible' choose 4 80 --set training.micro_batch=3

hang() { "$skills/debug-hang/check.sh" "$@"; }
export PITH_HEARTBEAT_S=4
expect 0 'fine' hang 10 echo fine
expect 1 'status 3' hang 10 sh -c 'exit 3'
PITH_TEST_FAILURE=throw expect 1 'FAILED rank 2: no row 7' hang 60 "$PITHTRAIN" launch 3 --program "$PITH_BUILD_DIR/test_parallel" go
PITH_TEST_FAILURE=loop expect 1 'process [0-9]+, rank 2: ' hang 8 "$PITHTRAIN" launch 3 --program "$PITH_BUILD_DIR/test_parallel" go
[ $failures -eq 0 ] && echo "PASS"
exit $((failures > 0))

# The script ./pith itself: help, wrong commands, limits, a second setup that has nothing to do.
set -eu
pith="$PITH_SOURCE_DIR/pith"
fail() { echo "FAIL: $*"; exit 1; }

"$pith" --help >help.txt || fail "--help should succeed"
for command in demo setup build test bench fmt loc clean; do
  grep -q "pith $command" help.txt || fail "--help does not speak of $command"
done
[ "$(awk 'length > 100' help.txt)" = "" ] || fail "--help is wider than 100 columns"

for pair in biuld:build tset:test stup:setup format:fmt demmo:demo; do
  status=0
  "$pith" "${pair%:*}" 2>wrong.txt || status=$?
  [ $status -eq 2 ] || fail "'${pair%:*}' exits with $status, not 2"
  grep -q "'${pair#*:}'" wrong.txt || fail "'${pair%:*}' should suggest ${pair#*:}: $(cat wrong.txt)"
done

for call in "setup --nonsense" "fmt --nonsense" "clean --nonsense" "bench --nonsense"; do
  # shellcheck disable=SC2086
  if "$pith" $call 2>wrong.txt; then fail "'$call' should be refused"; fi
  grep -q -- --nonsense wrong.txt || fail "'$call' should name the option"
done

"$pith" loc >loc.txt || fail "over a limit: $(cat loc.txt)"
grep -q '^all ' loc.txt || fail "loc prints no total"

begin=$(date +%s%N)
"$pith" setup 2>setup.txt || fail "second setup: $(cat setup.txt)"
milliseconds=$((($(date +%s%N) - begin) / 1000000))
[ "$(wc -l <setup.txt)" -eq 1 ] || fail "a second setup did something: $(cat setup.txt)"
[ $milliseconds -lt 5000 ] || fail "a second setup took $milliseconds ms"  # 100 ms when idle

# A copy without .deps: build says what to do first.
mkdir copy && cp "$pith" copy/
if copy/pith build 2>none.txt; then fail "build without setup should fail"; fi
grep -q "pith setup" none.txt || fail "build without setup should name ./pith setup"
echo PASS

#!/usr/bin/env bash
# The command line as a person meets it: help, version, mistakes, exit statuses.
set -u
failures=0
fail() { echo "FAIL: $*"; failures=$((failures + 1)); }

# expect STATUS PATTERN ARGUMENTS...: runs the program; its output (both streams) matches the pattern.
expect() {
  local status=$1 pattern=$2 output got
  shift 2
  output=$("$PITHTRAIN" "$@" 2>&1)
  got=$?
  [ $got -eq "$status" ] || fail "pithtrain $*: exit status $got, not $status: $output"
  grep -qE -- "$pattern" <<<"$output" || fail "pithtrain $*: no '$pattern' in: $output"
}

expect 0 'pithtrain pretrain run.toml' --help
for command in corpus pretrain launch generate inspect trace convert compare estimate report; do
  expect 0 "^ +$command +[A-Za-z]" --help
  expect 0 'xample' "$command" --help
done
expect 0 'training\.lr|  lr  ' pretrain --help
expect 0 '^pithtrain .*LibTorch 2\.' --version

# Usage: status 2, the word that is wrong, nothing on standard output.
expect 2 'command is required'
expect 2 'command is required' --
expect 2 'pretran is not known here' pretran run.toml
expect 2 '--dry-rnu is not known here' pretrain run.toml --dry-rnu
expect 2 '--versoin is not known here' --versoin
expect 2 'biuld is not known here' corpus biuld
expect 2 'see pithtrain pretrain --help' pretrain
[ -z "$("$PITHTRAIN" pretran 2>/dev/null)" ] || fail "a usage error wrote on standard output"

# Mistakes in a configuration: status 1; file, line and key; all of them.
cat >run.toml <<'END'
[training]
stpes = 5
steps = 1e6
END
expect 1 '^run\.toml:2: training\.stpes: unknown key; nearest is training\.steps$' pretrain run.toml
expect 1 '^run\.toml:3: training\.steps: must be an integer' pretrain run.toml
expect 1 '^--set: training\.lr: ' pretrain run.toml --set training.lr=.5
expect 1 'cannot open nowhere\.toml' pretrain nowhere.toml
expect 1 'nowhere' inspect nowhere

# No backtrace and no LibTorch internals reach a person.
for arguments in 'pretrain run.toml' 'inspect nowhere' 'generate nowhere'; do
  # shellcheck disable=SC2086
  "$PITHTRAIN" $arguments 2>&1 | grep -E 'frame #|c10::|0x[0-9a-f]{8}' && fail "$arguments: internals"
done

# What a full disk does to standard output is an error too.
"$PITHTRAIN" pretrain --help >/dev/full 2>/dev/null && fail "writing to a full disk succeeded"

# The same text in every locale.
reference=$("$PITHTRAIN" pretrain --help)
for locale in C C.UTF-8 de_DE.UTF-8 tr_TR.UTF-8; do
  [ "$(LC_ALL=$locale "$PITHTRAIN" pretrain --help)" = "$reference" ] || fail "locale $locale"
done

[ $failures -eq 0 ] && echo "command line: PASS"
exit $((failures > 0))

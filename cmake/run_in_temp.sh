#!/usr/bin/env bash
# run_in_temp.sh SCRIPT: runs one integration test in a temporary folder; keeps it on failure.
set -u
folder=$(mktemp -d "${TMPDIR:-/tmp}/pith-test.XXXXXX")
(cd "$folder" && TEST_TMP="$folder" PITH_SOURCE_DIR="$OLDPWD" bash "$1")
status=$?
if [ $status -eq 0 ] || [ $status -eq 77 ]; then rm -rf "$folder"; else echo "kept: $folder"; fi
exit $status

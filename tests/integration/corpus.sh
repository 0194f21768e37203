#!/usr/bin/env bash
# corpus build, verify, inspect and show, and inspect of every kind of path, through the program.
set -eu
fail() { echo "FAIL: $*"; exit 1; }
# expect STATUS PATTERN COMMAND...: both streams of the program match the pattern.
expect() {
  local status=$1 pattern=$2 output got=0
  shift 2
  output=$("$PITHTRAIN" "$@" 2>&1) || got=$?
  [ $got -eq "$status" ] || fail "pithtrain $*: exit status $got, not $status: $output"
  grep -qE -- "$pattern" <<<"$output" || fail "pithtrain $*: no '$pattern' in: $output"
}

tree="src ü b'\$HOME"
mkdir -p "$tree/z" "$tree/.git" "$tree/a"
printf 'int a;\n' >"$tree/a/one.h"
printf 'int a;\n' >"$tree/z/same.h"               # duplicate
printf 'ein Satz mit ü\n<|endoftext|> is text\n' >"$tree/z/two.hpp"
printf 'hidden\n' >"$tree/.git/three.h"
printf 'hidden\n' >"$tree/.four.h"
printf 'no extension\n' >"$tree/z/vector"
printf 'other\n' >"$tree/z/readme.md"
: >"$tree/a/empty.h"
printf 'a\0b' >"$tree/a/binary.h"
printf '\xff\xfe' >"$tree/a/latin.h"
ln -s .. "$tree/a/loop.h"                         # a linked folder

build=(corpus build --extensions .h,.hpp,none "$tree")
expect 0 'train +3 documents, 58 bytes of text, 61 tokens' "${build[@]}" --out "out ü/train"
expect 0 'skipped +4: 1 duplicates, 1 empty, 2 not UTF-8 text' "${build[@]}" --out again/train
for extension in bin idx json; do cmp "out ü/train.$extension" again/train.$extension; done
expect 1 'no document for nothing' corpus build --out nothing "$tree/a/empty.h"
expect 1 'nowhere does not exist' corpus build --out nothing nowhere
expect 2 'validation-out' "${build[@]}" --out x --validation-share 0.5
[ ! -e nothing.bin ] && [ ! -e nothing.bin.tmp ] || fail "a failed build left files"

expect 0 '3 documents' corpus verify "out ü/train"
expect 0 'vocabulary 257' corpus inspect "out ü/train"
"$PITHTRAIN" corpus show "out ü/train" 1 >shown
cmp shown "$tree/z/two.hpp" || fail "show does not give the document back"
"$PITHTRAIN" corpus show "out ü/train" 0 --ids | tail -n 1 | grep -qx 256 || fail "no end token"
expect 1 'no document 3 among 3' corpus show "out ü/train" 3

# A document stays on its side when others come and go, and no document is on both sides.
mkdir many
for i in $(seq 1 200); do echo "text $i" >"many/$i.txt"; done
split=(--validation-share 0.2)
"$PITHTRAIN" corpus build many --out s/train "${split[@]}" --validation-out s/validation >summary
grep -qE 'validation +(2[5-9]|3[0-9]|4[0-9]|5[0-5]) documents' summary || fail "$(cat summary)"
texts() { for i in $(seq 0 $(($1 - 1))); do "$PITHTRAIN" corpus show "$2" "$i"; done; }
texts 5 s/validation | sort >held_out
rm many/?.txt
"$PITHTRAIN" corpus build many --out s/train "${split[@]}" --validation-out s/validation >summary
texts 5 s/validation | sort >held_out_later
[ "$(comm -12 held_out held_out_later | wc -l)" -ge 1 ] || fail "the split moved"

# inspect tells each kind of path by itself, and damage by its status.
for path in "out ü/train" "out ü/train.bin" "out ü/train.idx" "out ü/train.json"; do
  expect 0 'corpus of 3 documents' inspect "$path"
done
model=$PITH_SOURCE_DIR/tests/golden/qwen3_moe_a
expect 0 'model folder' inspect "$model/"
expect 0 'safetensors file' inspect "$model/model.safetensors" --tensors
cp -r "$model" model
truncate -s -1 model/model.safetensors
expect 1 'model.safetensors: tensor .* ends at byte' inspect model
expect 1 'many is none that this program knows' inspect many
printf x | dd of="out ü/train.bin" bs=1 seek=20 conv=notrunc 2>/dev/null
expect 1 'damaged: .*train.bin is damaged between bytes 0 and 122: documents 0 to 2' inspect "out ü/train"
expect 1 'damaged' corpus verify "out ü/train"
truncate -s -2 again/train.bin
expect 1 'document 2 ends at token 61, the .bin holds 60' corpus show again/train 0
echo PASS

#!/usr/bin/env bash
# corpus build at scale: workers, kill -9, hostile inputs, Parquet.
set -eu
fail() { echo "FAIL: $*"; exit 1; }
expect() {  # expect STATUS PATTERN COMMAND...: both streams of the program match the pattern
  local status=$1 pattern=$2 output got=0
  shift 2
  output=$("$PITHTRAIN" "$@" 2>&1) || got=$?
  [ $got -eq "$status" ] || fail "pithtrain $*: exit status $got, not $status: $output"
  grep -qE -- "$pattern" <<<"$output" || fail "pithtrain $*: no '$pattern' in: $output"
}
same() {  # same A B: two corpora of one build are the same files
  local file
  for file in "$1"*.bin "$1"*.idx "$1"*.json; do
    cmp "$file" "$2${file#"$1"}" || fail "$file differs"
  done
  [ "$(ls "$1"*.bin | wc -l)" = "$(ls "$2"*.bin | wc -l)" ] || fail "$1 and $2 have other shards"
}

# About 10 MB of lines: some twice, some bad, ids in them.
mkdir raw
awk 'BEGIN { srand(7); for (i = 0; i < 24000; ++i) { text = ""
  for (k = int(rand() * 90); k >= 0; --k) text = text " w" int(rand() * 5000)
  if (i % 50 == 3) text = "again"
  if (i % 8000 == 77) print "{\"text\": " i "}"
  printf "{\"id\": \"d%d\", \"meta\": {\"n\": [1, 2]}, \"text\": \"%s\\n\"}\n", i, text } }' >raw/a.jsonl
head -n 8000 raw/a.jsonl | sed 's/ w1/ v1/g' | gzip -c >raw/b.jsonl.gz
printf 'a plain text\n' >raw/c.txt
if command -v zstd >/dev/null; then tail -n 8000 raw/a.jsonl | sed 's/ w2/ u2/g' | zstd -q >raw/d.jsonl.zst; fi

build=(corpus build raw --id-field id --shard-size 1500000 --min-length 9
       --validation-share 0.05)
for workers in 1 2 3 8; do
  mkdir w$workers
  expect 0 'bad +[0-9]+ lines' "${build[@]}" --workers $workers --out w$workers/t \
    --validation-out w$workers/v
  same w1/ w$workers/
done
"$PITHTRAIN" "${build[@]}" --workers 2 --out w2/t --validation-out w2/v >summary
grep -qE 'raw/a.jsonl:78: field "text" is 77, not text' summary || fail "$(cat summary)"
grep -qE 'skipped +[0-9,]+: [1-9][0-9,]* duplicates' summary || fail "$(cat summary)"
grep -qE 'longest +[0-9,]+ tokens: raw/[abd].jsonl' summary || fail "$(cat summary)"
[ -e w1/t-00002-of-*.idx ] || ls w1/t-00002-of-*.idx >/dev/null || fail "too few shards"
expect 0 'all files are as they were written' corpus verify w1/t
expect 0 'shards +[3-9]' corpus inspect w1/t
expect 0 "shards +[3-9]" inspect w1/t
[ ! -e w1/t.build ] || fail "a finished build left its folder"

# kill -9 at random moments, then to the end.
mkdir cut
kills=0
while [ $kills -lt 20 ]; do
  status=0
  timeout -s KILL "0.$((RANDOM % 10))$((RANDOM % 10))" "$PITHTRAIN" "${build[@]}" \
    --workers $((RANDOM % 3 + 1)) --out cut/t --validation-out cut/v >/dev/null 2>&1 || status=$?
  kills=$((kills + 1))
  if [ $status -eq 0 ]; then same w1/ cut/; rm -r cut; mkdir cut; fi
done
"$PITHTRAIN" "${build[@]}" --out cut/t --validation-out cut/v >/dev/null 2>&1
same w1/ cut/
[ "$(ls cut | grep -c tmp)" = 0 ] || fail "left: $(ls cut)"

# An interrupted build goes on only with the same options and inputs.
mkdir late
head -c 9000 raw/b.jsonl.gz >late/cut.jsonl.gz
cp raw/a.jsonl late/a.jsonl
expect 1 'cut.jsonl.gz is cut short.*' corpus build late --out l/t
[ ! -e l/t.bin ] && [ ! -e l/t.idx ] || fail "half a corpus under its final name"
expect 1 'begun with \[minimum length: 0\], now it is \[minimum length: 5\]' \
  corpus build late --out l/t --min-length 5
cp raw/b.jsonl.gz late/cut.jsonl.gz
expect 1 'begun with \[input: "late/cut.jsonl.gz" \(9000 bytes' corpus build late --out l/t
expect 0 'train ' corpus build late --out l/t --restart
[ "$(ls l)" = "$(printf 't.bin\nt.idx\nt.json\nt.tokenizer')" ] || fail "left: $(ls l)"

# Hostile lines are counted with their place; more than --max-bad end the build.
mkdir bad
head -c 200000000 /dev/zero | tr '\0' x >bad/huge.jsonl
printf '\n{"text": "after"}\n{"other": 1}\n' >>bad/huge.jsonl
"$PITHTRAIN" corpus build bad --out b/t >summary
grep -q 'huge.jsonl:1: this line is longer than 16000000 bytes' summary || fail "$(cat summary)"
grep -q 'huge.jsonl:3: no field "text"' summary || fail "$(cat summary)"
expect 1 'more than 1 bad lines: bad/huge.jsonl:3' corpus build bad --out b2/t --max-bad 1
[ ! -e b2/t.bin ] || fail "half a corpus under its final name"
rm -r bad
if mkdir full && mount -t tmpfs -o size=2m tmpfs full 2>/dev/null; then
  expect 1 'No space left on device' corpus build raw/a.jsonl --out full/t
  [ ! -e full/t.bin ] && [ ! -e full/t.idx ] || fail "half a corpus on a full disk"
  umount full
fi

# show tells the borders of tokens; a shard that is missing is named.
expect 0 '^256 |[0-9]+ 256 "<\|endoftext\|>"' corpus show w1/t 0 --tokens
rm w1/t-00001-of-*.bin
expect 1 'there is no corpus w1/t-00001-of-' corpus show w1/t 0

# Parquet: the plugin of ./pith setup --parquet, or a message that names it.
parquet=$PITH_SOURCE_DIR/tests/text/golden/texts.parquet
if [ -e "$(dirname "$PITHTRAIN")/libpith_parquet.so" ]; then
  expect 0 'train +4 documents' corpus build "$parquet" --out q/t
  grep -q . <("$PITHTRAIN" corpus show q/t 3) || fail "no text from Parquet"
  expect 1 'no column "nothing"' corpus build "$parquet" --out q/u --text-field nothing
else
  expect 1 'pith setup --parquet' corpus build "$parquet" --out q/t
fi
echo PASS

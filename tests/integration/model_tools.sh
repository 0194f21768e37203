#!/usr/bin/env bash
# The commands about models and runs: convert, compare, estimate, report; what they make and what they refuse.
set -eu
. "$PITH_SOURCE_DIR/tests/tiny_run.sh"
golden=$PITH_SOURCE_DIR/tests/golden
expect() {  # expect STATUS PATTERN COMMAND [ARGUMENT...]: a line of what it prints, on both streams, matches
  local wanted=$1 pattern=$2 status=0
  shift 2
  "$PITHTRAIN" "$@" >log 2>&1 || status=$?
  [ $status -eq "$wanted" ] || { cat log; fail "exit status $status, not $wanted: $*"; }
  grep -qE -- "$pattern" log || { cat log; fail "no '$pattern' from: $*"; }
}
refuse() {  # refuse PATTERN ARGUMENT...: convert fails and leaves nothing behind
  expect 1 "$1" convert "${@:2}"
  [ -z "$(find . -name 'out*')" ] || fail "convert ${*:2} left $(find . -name 'out*')"
}

# Bytes of tensors, read without the program. edit.py FOLDER NAME INDEX VALUE changes a number of an FP32 folder.
cat >same.py <<'END'
import glob, json, struct, sys
def tensors(folder):
    found = {}
    for path in glob.glob(folder + "/model*.safetensors"):
        data = open(path, "rb").read()
        length, = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8:8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + x for x in entry["data_offsets"])
                found[name] = entry["dtype"], entry["shape"], data[begin:end]
    return found
a, b = (tensors(folder) for folder in sys.argv[1:])
differ = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
if differ:
    sys.exit(f"{sys.argv[1:]} differ in {differ[:5]}")
END
cat >edit.py <<'END'
import glob, json, struct, sys
folder, name, position, value = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
for path in glob.glob(folder + "/model*.safetensors"):
    data = bytearray(open(path, "rb").read())
    length, = struct.unpack("<Q", data[:8])
    entry = json.loads(bytes(data[8:8 + length])).get(name)
    if entry:
        struct.pack_into("<f", data, 8 + length + entry["data_offsets"][0] + 4 * position, value)
        open(path, "wb").write(data)
END
same() { "${PYTHON:-python3}" same.py "$@" || fail "other bytes"; }
edit() { "${PYTHON:-python3}" edit.py "$@"; }

# Every family in every layout on disk: the same bytes, whatever the shards; BF16 through FP32 and back too.
for model in "$golden"/{qwen3_moe,deepseek_v2,gpt_oss,qwen3_5_moe}_?; do
  name=$(basename "$model")
  expect 0 ' tensors in .*, 0 of them new' convert "$model" "$name" --shard-size 20kB
  same "$model" "$name"
  [ "$(ls "$name"/model-*.safetensors | wc -l)" -gt 1 ] || fail "$name is in one file"
  [[ $name == *_a ]] || continue
  expect 0 '' convert "$name" "$name.bf16" --dtype bfloat16
  expect 0 '' convert "$name.bf16" "$name.wide" --dtype float32
  expect 0 '' convert "$name.wide" "$name.again" --dtype bfloat16
  expect 0 '' convert "$name.bf16" "$name.copy"
  same "$name.bf16" "$name.again"
  same "$name.bf16" "$name.copy"
  grep -q '"dtype": "bfloat16"' "$name.copy/config.json" || fail "dtype in config.json"
  expect 1 ' within 0$' compare "$model" "$name.wide"
  expect 0 ' within 0.01$' compare "$model" "$name.wide" --tolerance 0.01
done

# Layers, vocabulary, dtype.
model=$golden/qwen3_moe_a
expect 0 '' convert "$model" cut --layers 1
expect 1 '^only in A +model\.layers\.1' compare "$model" cut --limit 99
! grep -qE 'only in B|model\.layers\.0' <(grep -v '^0' log) || fail "cutting layers changed others"
expect 0 '' convert "$model" grown --vocabulary 140
expect 1 '^\(131, 24\) and \(140, 24\) +lm_head.weight$' compare "$model" grown
expect 0 '' convert grown back --vocabulary 131
same "$model" back
expect 0 'note: eos_token_id 96 is beyond' convert "$golden/qwen3_moe_b" tied --vocabulary 90
! grep -q lm_head tied/model.safetensors.index.json || fail "a tied head is written"
"${PYTHON:-python3}" - <<'END'
import json, struct
data = open("grown/model-00001-of-00001.safetensors", "rb").read()
length, = struct.unpack("<Q", data[:8])
for name in "model.embed_tokens.weight", "lm_head.weight":
    entry = json.loads(data[8:8 + length])[name]
    assert (entry["dtype"], entry["shape"]) == ("F32", [140, 24]), entry
    values = struct.unpack_from("<3360f", data, 8 + length + entry["data_offsets"][0])
    for column in range(24):
        mean = sum(values[column:131 * 24:24]) / 131
        assert all(abs(values[row * 24 + column] - mean) < 1e-7 for row in range(131, 140)), (name, column)
END

# Refused, with nothing left behind.
refuse 'no tensor has such a name' "$model" out --reinit 'layers\.77'
refuse 'regular expression' "$model" out --reinit '('
refuse 'cannot cut a model of 3 layers to 4' "$model" out --layers 4
refuse 'shard-size' "$model" out --shard-size -5
refuse 'allocate' "$model" out --vocabulary 1000000000000
refuse 'exists already' "$model" cut
echo text >file && refuse 'exists already' "$model" file
refuse 'has no name' "$model" ''
cp -r back out.damaged && truncate -s -1 out.damaged/model-00001-of-00001.safetensors && mv out.damaged damaged
refuse 'model-00001-of-00001.safetensors' damaged out
cp -r back wrong && cp "$golden/deepseek_v2_a/config.json" wrong
refuse 'problems' wrong out
cp -r back huge && edit huge model.norm.weight 3 1e6
refuse 'model.norm.weight has numbers beyond float16' huge out --dtype float16
sed -i 's/"qwen3_moe"/"gpt5"/' wrong/config.json && sed -i 's/"deepseek_v2"/"gpt5"/' wrong/config.json
refuse 'model_type "gpt5" is not supported' wrong out

# compare: what differs most comes first.
cp -r back other
edit other model.layers.0.mlp.gate.weight 7 3.5
edit other model.norm.weight 0 1.0001
expect 1 '62 tensors, 60 equal, 60 within 0' compare back other
sed -n 2p log | grep -q 'model.layers.0.mlp.gate.weight$' || { cat log; fail "the largest difference is not first"; }
edit other lm_head.weight 5 nan
expect 1 '59 equal' compare back other --tolerance 1e9
sed -n 2p log | grep -q '^-*nan.*lm_head.weight$' || { cat log; fail "NaN is not first"; }
expect 1 'neither model.safetensors nor' compare back .
expect 1 'nowhere' compare back nowhere

# Random weights are those that training begins with.
tiny_text 60
"$PITHTRAIN" corpus build --out corpus text >/dev/null
tiny_config layers=2
tiny_toml corpus <<'END'
[training]
steps = 4
global_batch = 8
micro_batch = 1
lr = 1e-2
[log]
expert_counts = 2
END
train() { "$PITHTRAIN" pretrain run.toml --set run.folder="$1" "${@:2}" >"$1.log" 2>&1 || { cat "$1.log"; fail "$1"; }; }
train none --set training.lr=1e-30 --set training.steps=1  # too little to change a weight
train one
train longer --set training.steps=6
trained=one/checkpoints/step-00000004 initial=none/checkpoints/step-00000001
expect 0 ' of them new' convert $trained drawn --reinit . --seed 1
same drawn $initial
expect 0 ' 2 of them new' convert $trained part --reinit 'mlp\.gate\.weight$' --seed 1
expect 1 ' [1-9][0-9]* equal' compare $trained part --limit 2
expect 1 'tensors, 2 equal' compare $initial part
expect 0 '' convert $trained seed2 --reinit . --seed 2
expect 1 '^[1-9].*layers\.0\.self_attn\.q_proj\.weight' compare drawn seed2 --limit 99

# compare of runs: the steps that both have.
expect 0 '4 steps in common, of 4 and 4' compare one one
expect 1 '4 steps in common, of 4 and 6' compare one longer
grep -q 'loss$' log || fail "no curve of the loss"
mkdir apart empty
grep -E '"step":[56],' longer/metrics.jsonl >apart/metrics.jsonl
expect 1 'have no step in common' compare one apart

# estimate agrees with what the dry run prints, and says why nothing fits.
cd "$PITH_SOURCE_DIR"
log=$OLDPWD/log
run=examples/qwen3_30b_a3b_8layers.toml
"$PITHTRAIN" estimate $run --gpus 8 --limit 3 >"$log"
tail -n 3 "$log" | while read -r pp cp ep dp weights recompute rows gib _; do
  "$PITHTRAIN" pretrain $run --dry-run --processes 8 --set data.train="$OLDPWD/corpus" --set run.device=cpu --set parallel.pp="$pp" \
    --set parallel.cp="$cp" --set parallel.ep="$ep" --set parallel.weights="$weights" --set parallel.recompute="$recompute" \
    --set training.micro_batch="$rows" >"$log.dry" || fail "$pp $cp $ep"
  [ $((pp * cp * dp)) -eq 8 ] || fail "not 8 GPUs"
  sed -nE 's/^# memory +stage [0-9]+: ([0-9.]+) GiB.*/\1/p' "$log.dry" | sort -g | tail -n 1 |
    awk -v gib="$gib" '{ exit !($1 - gib < 0.06 && gib - $1 < 0.06) }' || fail "estimate and dry run differ: $gib"
done
cd "$OLDPWD"
run=$PITH_SOURCE_DIR/$run
config=(--set "model.config=$PITH_SOURCE_DIR/examples/qwen3_30b_a3b/config.json")
expect 1 'no layout fits 2 GPUs of 10 GiB; the smallest takes [0-9.]+ GiB' estimate "$run" "${config[@]}" --gpus 2 --memory 10
expect 2 '--gpus' estimate "$run" --gpus 0
for wrong in '--memory nan' '--memory -1' '--reserve 1' '--reserve nan'; do
  # shellcheck disable=SC2086
  expect 1 'leave nothing' estimate "$run" "${config[@]}" $wrong
done
expect 1 'no layout divides 1048573 GPUs' estimate "$run" "${config[@]}" --gpus 1048573

# report: all numbers, several runs; text that looks like HTML stays text; lines that a killed run left are passed over.
cp -r one hostile
cat >>hostile/metrics.jsonl <<'END'
{"event": "stop", "after_step": 4, "time": 1, "text": "</script><!--<script>alert(1)"}
{"event": 7, "text": []}
{"event": "no step"}
{"step": "five", "loss": 1}
[1, 2]
{"step": 5, "loss": 0.12
END
sed -i '1i # <!-- <script> </script>' hostile/config.toml
echo 'unknown = 1' >>longer/config.toml
expect 0 'report.html: 3 runs' report one longer hostile --out report.html
for key in loss balance_loss grad_norm lr seconds tokens_per_second memory_peak_gib expert_load max_over_mean counts; do
  grep -q "\"$key\":" report.html || fail "the report lacks $key"
done
[ "$(grep -o '<script\|</script\|<!--' report.html | tr '\n' ' ')" = '<script </script ' ] || fail "text breaks out of the script"
grep -q '"events":".*alert(1)' report.html || fail "an event is missing"
[ "$(grep -o '"total_steps":' report.html | wc -l)" -eq 14 ] || fail "not all steps are there"
! grep -qE '(src|href)=' report.html || fail "the report needs other files"

# What is not theirs stays: a report replaces only reports, convert makes its working folder itself, a resume keeps an average.
cp one/metrics.jsonl kept.jsonl
expect 1 'exists and is no report' report one --out kept.jsonl
cmp one/metrics.jsonl kept.jsonl || fail "report changed what it refused to replace"
source=$PITH_SOURCE_DIR/tests/golden/qwen3_moe_a
cp -r "$source" mine.converting
expect 1 'mine.converting exists' convert "$source" mine
diff -r "$source" mine.converting || fail "convert changed a folder that it did not make"
for wrong in nan -1 1e300; do expect 1 'init-std' convert "$source" fresh --reinit q_proj --init-std "$wrong"; done
expect 1 'longer than 1000 bytes' convert "$source" fresh --reinit "$(printf '(%.0s' {1..2000})a$(printf ')%.0s' {1..2000})"
mkdir weightless && echo '{"weight_map":{}}' >weightless/model.safetensors.index.json
expect 1 'hold no tensors' compare weightless weightless
mkdir deep && sed 's/"num_hidden_layers": [0-9]*/"num_hidden_layers": 1000000/' "$source/config.json" >deep/config.json
expect 1 'num_hidden_layers must lie in' convert deep fresh
expect 2 'not in range' pretrain "$run" --rows 4000000000000000000 1
if command -v node >/dev/null; then
  sed -n '/^<script>/,/^<\/script>/p' report.html | sed '1d;$d' >page.js
  node --check page.js || fail "the page's script"
fi
expect 0 'one/report.html: 1 runs' report one
expect 1 'empty is no run folder: it holds no metrics.jsonl' report empty
echo '{"event": "start"}' >empty/metrics.jsonl
expect 1 'no step is in metrics.jsonl' report one empty
echo PASS

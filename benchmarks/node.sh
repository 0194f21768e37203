#!/usr/bin/env bash
# Whole models on all GPUs of this machine: speed, memory and what is hidden, beside what was predicted. Without a GPU, or
# with --cpu N, tiny models of the same families on N (8) processes, in the same layouts.
#   benchmarks/node.sh [run]       every model and layout; what does not fit is cut to its first layers. Writes
#                                  node.jsonl (an object a run) and node.md (the table of docs/performance.md)
#   benchmarks/node.sh plan        only what would run, with the figures predicted; with --gpus and --memory no GPU is needed
#   benchmarks/node.sh curves      a small model on real text in FP32, in four layouts, each resumed half-way in the next one:
#                                  the losses have to agree; ends in PASS or FAIL
#   benchmarks/node.sh scaling     one cut on 1, 2, 4, ... GPUs, the same work on each: node-scaling.jsonl, node-scaling.md
# Options: --gpus N (all), --memory GIB (of one GPU; the smallest here), --cpu N, KEY=VALUE (of the configuration, for all runs).
# Environment: OUT (build/gpu-results) receives JSON, tables, metrics, profiles and logs; RUNS (runs/node) the run folders;
# DATA (runs/demo/corpus/train) the corpus; STEPS (12; curves 30); BUDGET (540 seconds in all; what has no time left is not run);
# LIMIT (180 seconds a run); ONLY="NAME NAME" runs these; TOKENS (65536) a step and GPU.
#
# The median is of the steps from the sixth to the last but one; the last one is profiled. "Idle" is the share of that step in
# which a rank did not compute: what it waited for others with nothing to do, hence the pipeline's bubble and more.
set -uo pipefail
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
source benchmarks/common.sh
out=${OUT:-build/gpu-results} runs=${RUNS:-runs/node} pithtrain=${PITHTRAIN:-$bin/pithtrain} data=${DATA:-runs/demo/corpus/train}

die() { echo "node.sh: $*" >&2; exit 2; }
word=run gpus="" memory="" cpu="" extra=()
while [ $# -gt 0 ]; do
  case $1 in
    run | plan | curves | scaling) word=$1 ;;
    --gpus | --memory | --cpu)
      [[ ${2:-} =~ ^[0-9]+(\.[0-9]+)?$ ]] || die "$1 needs a number"
      declare "${1#--}=$2"; shift ;;
    *=*) extra+=(--set "$1") ;;
    -h | --help) sed -n '2,19s/^# \{0,1\}//p' "$0"; exit ;;
    *) die "unknown word $1 (there are run, plan, curves, scaling, --gpus N, --memory GIB, --cpu N, KEY=VALUE)" ;;
  esac
  shift
done
if [ -z "$cpu" ] && [ -z "$gpus" ]; then
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
  [ "$gpus" -gt 0 ] || cpu=8
fi
device=cuda
[ -n "$cpu" ] && device=cpu gpus=$cpu memory=${memory:-139}
[ -n "$memory" ] || memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null |
  sort -n | awk 'NR == 1 { printf "%.1f", $1 / 1024 }')
[ -n "$memory" ] || die "no GPU tells its memory; say --memory GIB, or --cpu N"
find_libraries
[ -x "$pithtrain" ] || die "there is no $pithtrain; ./pith build, or benchmarks/gpu.sh pack on the building machine"
mkdir -p "$out" "$runs"
export PITH_COMM_TIMEOUT_S=${PITH_COMM_TIMEOUT_S:-120}
cores=$(nproc)

# ------------------------------------------------------------------------------------- what runs --

# Of each family: an example with everything but the layout, the model's name, its sequence length.
declare -A example=([deepseek]=deepseek_v2_lite_8layers [qwen3]=qwen3_30b_a3b_8layers [gpt_oss]=gpt_oss_20b_6layers)
declare -A title=([deepseek]=DeepSeek-V2-Lite [qwen3]=Qwen3-30B-A3B [gpt_oss]=GPT-OSS-20B)
declare -A config=([deepseek]=examples/deepseek_v2_lite/config.json [qwen3]=examples/qwen3_30b_a3b/config.json
  [gpt_oss]=examples/gpt_oss_20b/config.json)
declare -A sequence=([deepseek]=2048 [qwen3]=4096 [gpt_oss]=4096)
tokens=${TOKENS:-65536} form=""  # form: recompute and micro-batch, where they are given ("none 4")

tiny_models() {  # the same families for a CPU: eight layers for four stages, eight experts for EP 8
  local family common='"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 8, "max_position_embeddings": 64, "eos_token_id": 256,'
  tokens=${TOKENS:-128}
  mkdir -p "$runs/tiny"
  for family in "${!config[@]}"; do
    config[$family]=$runs/tiny/$family.json title[$family]="tiny ${title[$family]}" sequence[$family]=32
  done
  cat >"${config[deepseek]}" <<JSON
{"model_type": "deepseek_v2", $common "num_attention_heads": 2, "q_lora_rank": null, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
 "qk_rope_head_dim": 4, "v_head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 8,
 "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
JSON
  cat >"${config[qwen3]}" <<JSON
{"model_type": "qwen3_moe", $common "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48,
 "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": true, "rope_theta": 10000.0}
JSON
  cat >"${config[gpt_oss]}" <<JSON
{"model_type": "gpt_oss", $common "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64,
 "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 6, "rope_theta": 10000.0}
JSON
}

# each COMMAND: COMMAND FAMILY RANKS PP EP WEIGHTS for all that belongs on these GPUs, what matters most first. Fewer than
# eight have shorter pipelines and smaller groups; layouts that are then the same run once.
each() {
  local n=1 pp
  while [ $((2 * n)) -le "$gpus" ]; do n=$((2 * n)); done
  pp=$((n >= 8 ? 4 : n >= 4 ? 2 : n))
  "$1" deepseek $n $pp $((n / pp)) any
  "$1" qwen3 $n 1 $n "$([ $n -gt 1 ] && echo reshard || echo any)"
  "$1" gpt_oss $n 1 $((n > 2 ? n / 2 : n)) any
  [ $n -gt 1 ] || return 0
  "$1" deepseek $n 1 $n any
  "$1" qwen3 $n 2 $((n / 2)) any
  "$1" deepseek $n 1 1 any
}

name_of() {  # name_of FAMILY RANKS PP EP WEIGHTS
  local copies=$(($2 / $3 / $4)) name=$1
  [ "$3" = 1 ] || name+=-pp$3
  [ "$4" = 1 ] || name+=-ep$4
  [ $copies = 1 ] || name+=-$([ "$4" = 1 ] && echo fsdp || echo dp)$copies
  [ "$5" = reshard ] && name+=-reshard
  echo "$name"
}

# said FILE: the cause of a failure in a log, fit for JSON and a table.
said() { { grep -m 1 FAILED "$1" || tail -n 3 "$1"; } | tr '\n\t|' '  /' | tr -d '"\\\r' | cut -c 1-300; }

# choose FAMILY RANKS PP EP WEIGHTS [LAYERS]: of all layers, then of one fewer at a time, the quickest micro-batch and recompute
# that `pithtrain estimate` fits into 94 % of a GPU. Sets what is measured, and `keys`, the run's configuration.
choose() {
  local all row="" problem=""
  family=$1 n=$2 pp=$3 ep=$4
  name=$(name_of "$1" "$2" "$3" "$4" "$5")
  all=$(grep -oE '"num_hidden_layers": *[0-9]+' "${config[$1]}" | grep -oE '[0-9]+$')
  batch=$((n * tokens / ${sequence[$1]}))
  toml=examples/${example[$1]}.toml
  local fixed=(--set "model.config=${config[$1]}" --set "data.train=$data" --set "data.sequence_length=${sequence[$1]}"
    --set "training.global_batch=$batch" --set "training.micro_batch=1" --set "run.device=$device" "${extra[@]}")
  [ $device = cpu ] && fixed+=(--set model.dtype=float32)
  for ((layers = ${6:-$all}; layers >= pp; layers--)); do
    row=$("$pithtrain" estimate "$toml" "${fixed[@]}" --set model.num_layers=$layers --gpus "$n" --memory "$memory" \
      --reserve 0.06 --limit 1000000 2>"$out/estimate.log" | awk -v pp="$pp" -v ep="$ep" -v weights="$5" -v form="$form" '
        $1 == pp && $2 == 1 && $3 == ep && (form == "" || form == $6 " " $7) && (weights == "any" || $5 == weights) { print $5, $6, $7, $8, $9; exit }')
    [ -z "$row" ] || break
    problem=$(said "$out/estimate.log")
    [[ -z $problem || $problem == *"layout"* ]] || break  # a mistake is one with fewer layers too
  done
  [ -n "$row" ] || { why=${problem:-"no cut fits $n GPUs of $memory GiB"}; layers=0; return 1; }
  read -r weights recompute micro_batch gib seconds <<<"$row"
  [ $device = cuda ] || gib="" seconds=""  # the cost model is one of H200
  keys=("${fixed[@]}" --set "model.num_layers=$layers" --set "parallel.pp=$pp" --set "parallel.ep=$ep" --set "parallel.weights=$weights"
    --set "parallel.recompute=$recompute" --set "training.micro_batch=$micro_batch")
  # A head that weighs several layers leaves the other stages idle: the second one takes the share with the shortest step.
  local share span idle best="" shares=(0)
  [ "$pp" -gt 1 ] && shares=(0 0.1 0.2 0.3)
  for share in "${shares[@]}"; do
    plan=$("$pithtrain" pretrain "$toml" "${keys[@]}" --set "parallel.head_share=$share" "${extra[@]}" --dry-run --processes "$n" 2>&1) ||
      { echo "$plan" >"$out/$name.plan"; why=$(said "$out/$name.plan"); return 1; }
    awk -v memory="$memory" '/^# memory/ && $5 > 0.94 * memory { exit 1 }' <<<"$plan" || [ -z "$best" ] || continue
    flops=$(awk '/^# parameters/ { for (i = 1; i < NF; i++) if ($(i + 1) == "FLOP") flop = $i
      unit = substr(flop, length(flop)); print flop * (unit == "k" ? 1e3 : unit == "M" ? 1e6 : unit == "G" ? 1e9 : unit == "T" ? 1e12 : 1) }' <<<"$plan")
    read -r span idle <<<"$(simulated_step)"
    awk -v best="$best" -v span="$span" 'BEGIN { exit !(best == "" || span < 0.995 * best) }' || continue
    best=$span bubble=$idle head_share=$share
    chunks=$(sed -nE 's/^# chunks +([0-9, ]+) layers$/\1/p' <<<"$plan" | tr -d ' ')
    echo "$plan" >"$out/$name.plan"
  done
  [ $device = cpu ] || gib=$(awk '/^# memory/ && $5 > most { most = $5 } END { printf "%.1f", most }' "$out/$name.plan")
  keys+=(--set "parallel.head_share=$head_share" "${extra[@]}")
}

# A step's length in any unit and the idle share of each stage, as "123 [x,y]": the program's own schedule with the costs of this
# model's chunks and head in place of equal ones. A layer's forward, input and weight gradients take 1 each; the head stands in the last chunk's forward.
simulated_step() {
  local head
  [ "$pp" -gt 1 ] || { echo "1 [0]"; return; }
  head=$(awk -v flops="$flops" -v layers="$layers" '/"vocab_size"/ { v = field("vocab_size") } /"hidden_size"/ { h = field("hidden_size") }
    function field(key) { match($0, "\"" key "\": *[0-9]+"); return substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3) + 0 }
    END { head = 6 * v * h; print head / ((flops - head) / layers / 3) }' "${config[$family]}")
  "$pithtrain" schedule --pp "$pp" --microbatches $((batch / (n / pp) / micro_batch)) --head-share "$share" |
    awk -v P="$pp" -v chunks="$(sed -nE 's/^# chunks +([0-9, ]+) layers$/\1/p' <<<"$plan" | tr -d ' ')" -v head="$head" -v share="$share" -f benchmarks/simulate.awk
}

# ---------------------------------------------------------------------------------- what is run --

began=$SECONDS
left() { echo $((${BUDGET:-540} - (SECONDS - began))); }

# start RANKS SECONDS CONFIG KEY...: a training run as N processes, ended after so many seconds.
start() {
  local n=$1 limit=(timeout --foreground -k 15 "$2") command=("$pithtrain" pretrain "${@:3}")
  port=$((${port:-29510} + 1))
  export OMP_NUM_THREADS=$((cores > n ? cores / n : 1))
  if [ "$n" = 1 ]; then CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} "${limit[@]}" "${command[@]}"
  elif [ $device = cpu ]; then "${limit[@]}" "$pithtrain" launch "$n" "${command[@]:1}"
  else PORT=$port ranks "$n" "${limit[@]}" "${command[@]}"
  fi
}

# measure FAMILY RANKS PP EP WEIGHTS [LAYERS]: chooses, runs, and adds a line to $table.jsonl and to $table.md.
measure() {
  local name family n pp ep layers=0 batch=0 toml weights="" recompute="" micro_batch=0 gib="" seconds="" keys flops=0 chunks="" bubble="[]" why="" plan head_share=0
  local steps=${STEPS:-12} folder limit status
  name=$(name_of "$1" "$2" "$3" "$4" "$5")
  [[ " ${ONLY:-$name} " == *" $name "* ]] || return 0
  folder=$runs/$name
  rm -rf "$folder" "$out/$name".*
  status=planned
  if ! choose "$@"; then
    status="does not fit: $why"
    [[ $why == *"no cut fits"* || $why == *layout* ]] || status="failed: $why" failed=1
  elif [ $word != plan ]; then
    limit=$(awk -v left="$(left)" -v limit="${LIMIT:-180}" -v need="${seconds:-0}" -v steps="$steps" -v device=$device 'BEGIN {
      print (left < (device == "cpu" ? 5 : 30) + need * steps ? 0 : left < limit ? left : limit) }')
    if [ "$limit" = 0 ]; then
      status="not run: no time left"
    else
      printf -- '-- %s: %d layers, micro-batch %d of %d rows, %s, recompute %s; predicted %s s a step, %s GiB; %d s left\n' "$name" "$layers" \
        "$micro_batch" "$batch" "$weights" "$recompute" "${seconds:-?}" "${gib:-?}" "$(left)" >&2
      start "$n" "$limit" "$toml" "${keys[@]}" --set "training.steps=$steps" --set training.warmup_steps=1 \
        --set "profile.steps=[$steps,$steps]" --set "run.folder=$folder" --set log.tensorboard=false >"$out/$name.log" 2>&1
      case $? in
        0) status=ok ;;
        124 | 137) status="stopped after $limit s" failed=1 ;;
        *) status="failed: $(said "$out/$name.log")" failed=1 ;;
      esac
      cp "$folder/metrics.jsonl" "$out/$name.metrics.jsonl" 2>/dev/null
      for rank in "$folder"/profile-rank*.txt; do cp "$rank" "$out/$name.${rank##*/}" 2>/dev/null; done
    fi
  fi
  local files=("$out/$name.metrics.jsonl" "$out/$name".profile-rank*.txt) present=() file
  for file in "${files[@]}"; do [ -e "$file" ] && present+=("$file"); done
  awk -v name="$name" -v model="${title[$family]:-${title[$1]}}" -v layers="$layers" -v pp="$3" -v ep="$4" -v gpus="$2" -v device=$device \
    -v sequence="${sequence[$1]}" -v batch="$batch" -v micro_batch="$micro_batch" -v weights="$weights" -v recompute="$recompute" \
    -v chunks="$chunks" -v head_share="$head_share" -v steps="$steps" -v status="$status" -v flops="$flops" -v bubble="$bubble" -v seconds="$seconds" -v gib="$gib" \
    -v table="$table.md" -f benchmarks/node_record.awk "${present[@]}" </dev/null >>"$table.jsonl"
}

begin_table() {  # begin_table NAME
  table=$out/$1 failed=0
  : >"$table.jsonl"
  cat >"$table.md" <<'TABLE'
| run | layers | micro-batch | tokens/s (predicted) | MFU | step, s (predicted) | first step, s | GiB, fullest rank (predicted) | communication alone, ms | idle (bubble simulated) | status |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
TABLE
}

all_runs() {
  begin_table node
  each measure
  cat "$table.md"
  return $failed
}

scaling() {
  local layers rows n name family pp ep batch toml weights recompute micro_batch gib seconds keys flops chunks bubble why plan head_share
  begin_table node-scaling
  layers=$(sed -nE 's/^num_layers = ([0-9]+).*/\1/p' "examples/${example[qwen3]}.toml")
  for rows in 4 2 1; do  # the largest micro-batch that one GPU has memory for, without recompute
    form="none $rows"
    choose qwen3 1 1 1 any "$layers" && break
  done
  [ "$layers" -gt 0 ] || die "no cut of ${title[qwen3]} fits one GPU: $why"
  for ((n = 1; n <= gpus; n *= 2)); do measure qwen3 $n 1 $n any "$layers"; done
  cat "$table.md"
  printf '\n| GPUs | tokens/s of each | of one GPU | of the communication hidden |\n| --- | --- | --- | --- |\n'
  awk 'function field(key) { return match($0, "\"" key "\":[-0-9.e+]+") ? substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3) : "" }
    { each = field("tokens_per_second") / field("gpus"); if (NR == 1) one = each
      hidden = field("hidden_share")
      printf "| %d | %.1f | %s | %s |\n", field("gpus"), each, one ? sprintf("%.1f %%", 100 * each / one) : "", hidden == "" ? "" : sprintf("%.1f %%", 100 * hidden) }' "$table.jsonl" |
    tee -a "$table.md"
  return $failed
}

# ------------------------------------------------------------------------------------ the curves --

# FP32 and the tolerance of the skill compare-runs for another layout in FP32; runs differ by the order of sums only. The rate is a
# third of the demo's: at the demo's own the gradient has a spike at step 13, behind which differences of 1e-8 grow by 1.7 times a step.
curves() {
  local tolerance=1e-4 steps=${STEPS:-30} half names=() n=$gpus layout i next
  local model=(--set "data.train=$data" --set data.validation=[] --set validation.interval=0 --set "run.device=$device" --set training.micro_batch=1
    --set training.lr=1e-3 --set data.sequence_length=128 --set "training.global_batch=$((2 * gpus))" --set "training.steps=$steps" --set training.warmup_steps=$((steps / 3)) --set log.tensorboard=false
    --set checkpoint.keep_last=0 "${extra[@]}")
  half=$((steps / 2))
  case $n in  # PP CP EP
    8) names=("1 1 1" "4 1 2" "1 2 4" "2 2 2") ;;
    4) names=("1 1 1" "2 1 2" "1 2 2" "2 2 1") ;;
    2) names=("1 1 1" "2 1 1" "1 2 1" "1 1 2") ;;
    *) die "curves compares layouts of 2, 4 or 8 ranks, not of $n" ;;
  esac
  train() {  # train FOLDER PP CP EP
    echo "-- $1: pp $2 cp $3 ep $4" >&2
    start "$n" "${LIMIT:-400}" examples/demo.toml "${model[@]}" --set "parallel.pp=$2" --set "parallel.cp=$3" --set "parallel.ep=$4" \
      --set "checkpoint.interval=$half" --set "run.folder=$runs/$1" >"$out/$1.log" 2>&1 ||
      { tail -n 12 "$out/$1.log"; echo "FAIL: $1 did not end"; return 1; }
    cp "$runs/$1/metrics.jsonl" "$out/$1.metrics.jsonl"
  }
  losses() { sed -nE 's/.*"step":([0-9]+),.*"loss":([-0-9.e+]+).*/\1 \2/p' "$runs/$1/metrics.jsonl"; }
  for i in "${!names[@]}"; do
    rm -rf "$runs/curve-$i" "$runs/curve-moved-$i"
    # shellcheck disable=SC2086
    train "curve-$i" ${names[i]} || return 1
  done
  for i in "${!names[@]}"; do
    next=$(((i + 1) % ${#names[@]}))
    mkdir -p "$runs/curve-moved-$i/checkpoints"
    cp -r "$runs/curve-$i/checkpoints/step-$(printf %08d $half)" "$runs/curve-moved-$i/checkpoints/" || return 1
    # shellcheck disable=SC2086
    train "curve-moved-$i" ${names[next]} || return 1
    grep -q "at step $half" "$out/curve-moved-$i.log" || { echo "FAIL: curve-moved-$i did not resume at step $half"; return 1; }
  done
  for i in "${!names[@]}"; do
    for layout in "curve-$i" "curve-moved-$i"; do
      join <(losses curve-0 | sort) <(losses "$layout" | sort) | awk -v layout="$layout" '
        { d = $2 == 0 ? 1 : ($3 - $2) / $2; if (d < 0) d = -d; if (d >= worst) { worst = d; at = $1 }; n++; last = $3 }
        END { printf "%s %d %d %.2e %d\n", layout, n, NR ? 1 : 0, NR ? worst : 1, at }'
    done
  done >"$out/curves.txt"
  awk -v tolerance=$tolerance -v steps="$steps" -v half=$half -v layouts="${names[*]/%/;}" '
    BEGIN { split(layouts, name, /; */) }
    { moved = $1 ~ /moved/; i = substr($1, length($1)) + 1; wanted = moved ? steps - half : steps
      printf "%-28s %2d steps, largest relative difference to the first layout %.2e (step %d)\n",
        moved ? "[" name[i] "] then [" name[i % 4 + 1] "]" : "pp cp ep [" name[i] "]", $2, $4, $5
      if ($4 > worst) worst = $4
      if ($2 != wanted || $4 > tolerance) bad = 1 }
    END { if (NR != 8) bad = 1
      printf "%s: largest relative difference %.2e, tolerance %.0e, %d steps\n", bad ? "FAIL" : "PASS", worst, tolerance, steps; exit bad }' "$out/curves.txt"
}

[ $device = cpu ] && tiny_models
if [ $word != plan ] && [ -z "${DATA:-}" ]; then corpus >&2 || die "no corpus"; fi
trap 'kill $(jobs -p) 2>/dev/null; exit 130' INT TERM
case $word in
  run | plan) all_runs ;;
  *) "$word" ;;
esac

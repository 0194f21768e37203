#!/usr/bin/env bash
# A checkpoint of one layout on others, through the real program. Loaded and saved again without a step it holds the
# same bytes, in each layout of a chain; training goes on from it with the losses of the layout it came from; and back
# there, it ends with the very bytes of the run that was never moved.
set -eu
# processes pp cp ep weights, of each link of the chain; the run itself is pp 2, dp 4, ep 2
links=("8 1 1 4 reshard" "8 4 1 1 keep" "8 2 2 4 reshard" "1 1 1 1 keep")

. "$PITH_SOURCE_DIR/tests/tiny_run.sh"
tiny_text 60
"$PITHTRAIN" corpus build --out corpus/train text >/dev/null
tiny_config layers=6 experts=8 width=20 dense='[1]'
tiny_toml corpus/train <<'TOML'
[training]
steps = 6
global_batch = 16
micro_batch = 1
lr = 1e-2
schedule = "constant"
deterministic = true
[checkpoint]
interval = 3
keep_last = 0
[log]
tensorboard = false
TOML

train() {  # train FOLDER PROCESSES PP CP EP WEIGHTS
  local job=()
  [ "$2" -gt 1 ] && job=(launch "$2")
  "$PITHTRAIN" "${job[@]}" pretrain run.toml --set run.folder="$1" --set parallel.pp="$3" --set parallel.cp="$4" \
    --set parallel.ep="$5" --set parallel.weights="$6" --set parallel.head_share="$(share_of "$3")" >"$1.log" 2>&1 || { tail "$1.log"; fail "training $1"; }
}
resume_of() {  # resume_of FOLDER CHECKPOINT: a run folder that goes on from it
  mkdir -p "$1/checkpoints"
  cp -r "$2" "$1/checkpoints/"
}
losses() { grep '"loss"' "$1/metrics.jsonl" | sed -nE 's/.*"step": ?([456]),.*"loss": ?([^,}]*).*/\1 \2/p'; }

train straight 8 2 1 2 keep
saved=straight/checkpoints/step-00000003
[ "$(losses straight | wc -l)" -eq 3 ] || fail "no losses: $(tail -n 1 straight/metrics.jsonl)"
save_again $saved plain 1 1 1 1  # one process cuts no tensor and no file: what all others are compared with

from=$saved
for i in "${!links[@]}"; do
  read -r processes pp cp ep weights <<<"${links[i]}"
  name="$processes processes, pp $pp cp $cp ep $ep"
  save_again $from "chain$i" "$processes" "$pp" "$cp" "$ep"
  from=chain$i/step-00000003
  save_again $from "plain$i" 1 1 1 1
  diff -r plain "plain$i" || fail "$name changed the checkpoint"

  resume_of "moved$i" $saved
  train "moved$i" "$processes" "$pp" "$cp" "$ep" "$weights"
  grep -q 'at step 3' "moved$i.log" || fail "$name did not resume"
  paste -d' ' <(losses straight) <(losses "moved$i") |
    awk '{ d = $2 - $4; if (d < 0) d = -d; if ($1 != $3 || d > 1e-5 * $2) exit 1 } END { exit NR != 3 }' ||
    fail "$name: losses $(losses "moved$i" | tr '\n' ' ') instead of $(losses straight | tr '\n' ' ')"
done

resume_of back $from
train back 8 2 1 2 keep
diff <(losses straight) <(losses back) || fail "back on its layout the losses are others"
diff -r -x run.toml -x manifest.json straight/checkpoints/step-00000006 back/checkpoints/step-00000006 ||
  fail "back on its layout the weights or moments are others"
echo "PASS: $((${#links[@]} + 1)) layouts"

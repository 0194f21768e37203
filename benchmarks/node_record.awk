# A run of node.sh from its metrics and profiles: one JSON object on standard output, a row of Markdown added to the file `table`.
function field(key) { return match($0, "\"" key "\":[-0-9.e+]+") ? substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3) : "" }
function value(x) { return x == "" ? "null" : x }
function text(x) { return "\"" x "\"" }
function shown(x, form) { return x == "" ? "" : sprintf(form, x) }
function pair(measured, predicted) { return measured (measured == "" || predicted == "" ? "" : " ") (predicted == "" ? "" : "(" predicted ")") }
function list(of, form,    r, all) {
  for (r = 0; r < ranks; r++) all = all (r ? "," : "") ((r in of) ? sprintf(form, of[r]) : "null")
  return "[" all "]"
}
FILENAME ~ /metrics.jsonl$/ {
  step = field("step")
  if (step == "") next
  step += 0
  second[step] = field("seconds"); loss[step] = field("loss"); last = step
  next
}
FNR == 1 {
  rank = FILENAME; sub(/.*-rank/, "", rank); rank += 0
  if (rank >= ranks) ranks = rank + 1
}
FNR == 1 && /ms: computing/ {
  span[rank] = $1 + 0; computing[rank] = $4 + 0; communication[rank] = $6 + 0; alone[rank] = $11 + 0; idle[rank] = $15 + 0
  share[rank] = span[rank] ? 1 - computing[rank] / span[rank] : 0
}
/^  alone, started by / { stage = $4; sub(/:$/, "", stage); exposed[rank] = exposed[rank] (exposed[rank] == "" ? "" : ",") text(stage) ":" $5 }
/^  peak memory / { memory[rank] = $3 }
END {
  from = steps < 8 ? 2 : 6  # the last step is the profiled one
  for (s = from; s <= last && s < steps; s++) {
    x = second[s]
    for (i = n++; i > 0 && sorted[i - 1] > x + 0; i--) sorted[i] = sorted[i - 1]
    sorted[i] = x + 0
  }
  median = n ? sorted[int((n - 1) / 2)] : ""
  if (median > 0) rate = batch * sequence / median
  if (rate != "") mfu = flops * rate / gpus / 989e12
  if (seconds > 0) predicted = batch * sequence / seconds
  for (r = 0; r < ranks; r++) {
    by_stage = by_stage (r ? "," : "") "{" exposed[r] "}"
    if (!(r in span)) continue  # a rank that has not come so far
    reported++
    if (memory[r] > most) most = memory[r]
    if (alone[r] > worst) { worst = alone[r]; stages = exposed[r] }
    talk += communication[r]; open += alone[r]; waiting += share[r]
  }
  gsub(/[][]/, "", bubble); stage_count = split(bubble, simulated, ",")
  for (i = 1; i <= stage_count; i++) mean += simulated[i] / stage_count
  layout = "pp " pp ", ep " ep ", dp " gpus / pp
  printf "{\"name\":%s,\"model\":%s,\"device\":%s,\"gpus\":%d,\"layers\":%d,\"layout\":%s,\"weights\":%s,\"recompute\":%s,\"chunks\":%s,\"head_share\":%s,", text(name), text(model),
    text(device), gpus, layers, text(layout), text(weights), text(recompute), text(chunks), head_share + 0
  printf "\"sequence\":%d,\"global_batch\":%d,\"micro_batch\":%d,\"flop_per_token\":%.6g,\"status\":%s,\"steps\":%d,\"loss\":[%s,%s],", sequence, batch,
    micro_batch, flops, text(status), last, value(loss[1]), value(loss[last])
  printf "\"tokens_per_second\":%s,\"mfu\":%s,\"median_seconds\":%s,\"first_step_seconds\":%s,", value(shown(rate, "%.1f")), value(shown(mfu, "%.3g")),
    value(shown(median, "%.4f")), value(second[1])
  printf "\"memory_gib\":%s,\"exposed_ms\":[%s],\"computing_ms\":%s,\"communication_ms\":%s,\"idle_ms\":%s,\"hidden_share\":%s,", list(memory, "%.2f"), by_stage,
    list(computing, "%.2f"), list(communication, "%.2f"), list(idle, "%.2f"), (talk > 0 ? sprintf("%.3f", 1 - open / talk) : "null")
  printf "\"idle_share\":%s,\"bubble_simulated\":[%s],\"predicted_seconds\":%s,\"predicted_tokens_per_second\":%s,\"predicted_memory_gib\":%s}\n",
    list(share, "%.4f"), bubble, value(seconds), value(shown(predicted, "%.1f")), value(gib)

  gsub(/"/, "", stages); gsub(/,/, ", ", stages); gsub(/:/, " ", stages)
  if (weights == "reshard" && name !~ /reshard/) note = ", reshard"
  if (recompute == "layer") note = note ", recompute"
  if (head_share > 0) note = note ", head share " head_share
  printf "| %s%s | %s | %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", name, note, layers, micro_batch, pair(shown(rate, "%.0f"), shown(predicted, "%.0f")),
    shown(100 * mfu, mfu == "" ? "" : "%.1f %%"), pair(shown(median, "%.3f"), seconds), shown(second[1], "%.2f"), pair(shown(most, "%.1f"), gib),
    (worst ? sprintf("%.0f (%s)", worst, stages) : ""), pair(reported ? sprintf("%.1f %%", 100 * waiting / reported) : "", bubble == "" ? "" : sprintf("%.1f %%", 100 * mean)),
    status >>table
}

#!/usr/bin/env bash
# A profiled step of Qwen3-MoE on one GPU by operator: FLOPs, bytes, time at the measured ceilings, time measured.
#   benchmarks/breakdown.sh RUN_FOLDER
# RUN_FOLDER is of a run with profile.steps=[N,N]: config.toml, profile-rank0.txt and, better, trace-rank0.json. A matrix
# product belongs to the head if it takes long enough; the summary knows only the mean of all calls of a kernel, the trace
# each of them. FLOPs and bytes are those of operators_gpu.cpp, for rows of one document (document_mask = false): what must
# be computed and moved at least, not what LibTorch's element-wise operations really move.
set -uo pipefail
[ $# = 1 ] || { sed -n '3s/^# *//p' "$0"; exit 2; }
here=$(dirname "${BASH_SOURCE[0]}") folder=$1
die() { echo "breakdown: $*" >&2; exit 1; }
[ -r "$folder/config.toml" ] && [ -r "$folder/profile-rank0.txt" ] ||
  die "$folder holds no config.toml and profile-rank0.txt: train with --set profile.steps=[7,7]"

# config.toml as lines "section.key<tab>value".
settings=$(awk -v OFS='\t' '
  /^\[/ { section = substr($1, 2, index($1, "]") - 2); next }
  / = / { key = $1; sub(/^[^=]*= */, ""); gsub(/"/, ""); print section "." key, $0 }' "$folder/config.toml")
model=$(awk -F'\t' '$1 == "model.config" { print $2 }' <<<"$settings")
[ -d "$model" ] && model=$model/config.json
[ -r "$model" ] || die "cannot read the model's configuration '$model' (paths of a run start where it was started)"
sizes=$(awk -f "$here/json.awk" "$model") || die "$model is damaged"
grep -q $'^model_type\tqwen3_moe$' <<<"$sizes" || die "$model is no qwen3_moe; other families are not counted here"

# Kernels as lines "ms<tab>calls<tab>name".
kernels() {
  if [ -r "$folder/trace-rank0.json" ]; then
    awk -v OFS='\t' '
      /"ph": "X", "cat": "(kernel|gpu_memcpy|gpu_memset)"/ {
        name = $0
        sub(/^.*"cat": "[a-z_]*", "name": "/, "", name)
        sub(/", "pid": .*$/, "", name)
        next
      }
      name != "" && match($0, /"dur": [0-9.]+/) { print substr($0, RSTART + 7, RLENGTH - 7) / 1000, 1, name; name = "" }
    ' "$folder/trace-rank0.json"
  else
    awk -v OFS='\t' 'table { ms = $1; calls = $3; sub(/^ *[0-9.]+ +[0-9.]+ +[0-9]+  /, ""); print ms, calls, $0 }
      $1 == "ms" { table = 1 }' "$folder/profile-rank0.txt"
  fi
}

{
  printf '%s\n' "$settings" "$sizes" | sed $'s/^/size\t/'
  awk -v OFS='\t' 'NR == 1 { print "size", "span", $1 }' "$folder/profile-rank0.txt"
  kernels | sed $'s/^/kernel\t/'
} | awk -F'\t' '
  $1 == "size" { size[$2] = $3; next }
  !counted { count(); counted = 1 }
  { group = group_of($4, $2 / $3); ms[group] += $2 / steps; by_name[group, $4] += $2 / steps; names[group, $4] = $4 }

  # What every operator of a step computes (FLOP) and moves (bytes) at least.
  function count(    n, m, l, h, q, kv, e, i, v, s, slots, layer, experts, dense, chunks, fits, b) {
    if (split(size["profile.steps"], b, /[^0-9]+/) >= 3) steps = b[3] - b[2] + 1
    if (steps < 1) steps = 1
    s = size["data.sequence_length"]
    n = size["training.global_batch"] * s                       # tokens
    m = size["training.global_batch"] / size["training.micro_batch"]
    l = size["model.num_layers"] > 0 ? size["model.num_layers"] : size["num_hidden_layers"]
    h = size["hidden_size"]
    q = size["num_attention_heads"] * size["head_dim"]
    kv = size["num_key_value_heads"] * size["head_dim"]
    e = size["num_experts"]
    i = size["moe_intermediate_size"]
    v = size["vocab_size"]
    slots = n * size["num_experts_per_tok"]
    experts = 3 * e * h * i                                     # elements of a layer
    dense = h * (q + 2 * kv) + q * h
    parameters = l * (experts + dense + e * h + 2 * h + 2 * size["head_dim"]) + 2 * v * h + h

    # BF16 rows in and out; weights once a micro-batch and pass; weight gradients FP32, read and written.
    add("grouped products", l * 12 * slots * h * i, l * (2 * slots * (4 * h + 7 * i) + m * 4 * experts))
    add("grouped weight gradient", l * 6 * slots * h * i, l * (2 * slots * (2 * h + 3 * i) + m * 8 * experts))
    add("attention forward", l * 2 * n * s * q, l * (2 * n * (2 * q + 2 * kv) + 4 * n * size["num_attention_heads"]))
    add("attention backward", l * 5 * n * s * q, l * (2 * n * (4 * q + 4 * kv) + 4 * n * size["num_attention_heads"]))
    # Query, key, value, output; the router in FP32, its backward in three parts.
    add("projections, router product", l * (6 * n * dense + 14 * n * h * e),
      l * (6 * n * (h + q + 2 * kv + q + h) + m * 12 * dense + n * (6 * h + 16 * e)))
    # Chunks as in operators/linear_cross_entropy.cpp: each reads the weight twice and adds to its gradient.
    fits = int(5 * 2 ^ 28 / (2 * v))
    chunks = int((n / m + fits - 1) / fits)
    add("head products", 6 * n * h * v, 6 * n * v + 6 * n * h + m * chunks * 12 * v * h)
    add("softmax of the head", 0, 4 * n * v)
    long = 2 * (n / m / chunks) * h * v / 790e12 * 1e3 / 2      # ms of half a product of the head at the ceiling
    add("norms", 0, 10 * n * (l * (2 * h + q + kv) + h))
    add("rotary", 0, l * 8 * n * (q + kv))
    add("permute, unpermute", 0, l * 2 * h * (4 * n + 5 * slots))
    add("swiglu", 0, l * 10 * slots * i)                         # backward; the forward is in a product
    add("router, expert plan", 0, l * (16 * n * e + 16 * slots))
    add("AdamW", 0, 30 * parameters)
    add("norm of the gradient", 0, 4 * parameters)
    add("zeroing", 0, 4 * parameters)
    add("additions", 0, l * 30 * n * h)                         # two residuals, three sums of gradients
    add("rest", 0, 0)
  }
  function add(name, f, b) { order[++groups] = name; flop[name] = f; bytes[name] = b }

  # mean_ms: of a call.
  function group_of(name, mean_ms) {
    if (name ~ /weight_gradient_kernel/) return "grouped weight gradient"
    if (name ~ /product_kernel|cutlass::device_kernel|GroupProblem|grouped_gemm/) return "grouped products"
    if (name ~ /fprop|flash_fwd/) return "attention forward"
    if (name ~ /cudnn|flash|fmha/) return "attention backward"
    if (name ~ /cross_entropy_kernel/) return "softmax of the head"
    if (name ~ /pith::.*::(forward|backward|add_columns)_kernel/) return "norms"
    if (name ~ /rotary_kernel/) return "rotary"
    if (name ~ /pith::.*(scatter|gather_sum|unpermute_backward)_kernel/) return "permute, unpermute"
    if (name ~ /swiglu_kernel/) return "swiglu"
    if (name ~ /route_(forward|backward)_kernel|[Rr]adix|[Ss]earchsorted/) return "router, expert plan"
    if (name ~ /adamw_kernel/) return "AdamW"
    if (name ~ /pith::.*(squares|total)_kernel/) return "norm of the gradient"
    if (name ~ /FillFunctor|Memset/) return "zeroing"
    if (name ~ /CUDAFunctor(OnSelf|OnOther)?_add/) return "additions"
    if (name ~ /nvjet|gemm|cublas|cutlass/) return mean_ms > long ? "head products" : "projections, router product"
    return "rest"
  }
  function at_ceilings(name) {
    return 1e3 * (flop[name] / 790e12 > bytes[name] / 4.27e12 ? flop[name] / 790e12 : bytes[name] / 4.27e12)
  }
  function row(name, f, b, ceiling, time) {
    printf "%-28s %9s %9s %9s %9.2f %7.2f %7s\n", name, (f ? sprintf("%.2f", f / 1e12) : "-"), (b ? sprintf("%.1f", b / 1e9) : "-"),
      (ceiling ? sprintf("%.2f", ceiling) : "-"), time, 100 * time / span, (ceiling && time ? sprintf("%.2f", time / ceiling) : "-")
  }
  END {
    if (!counted) { print "breakdown: no kernels in the profile (was it recorded on a GPU?)" >"/dev/stderr"; exit 1 }
    span = size["span"] / steps
    printf "%-28s %9s %9s %9s %9s %7s %7s\n", "operator", "TFLOP", "GB", "ceil. ms", "ms", "%", "times"
    for (j = 1; j <= groups; ++j) {                             # by time
      for (k = j + 1; k <= groups; ++k)
        if (order[j] == "rest" || (order[k] != "rest" && ms[order[k]] > ms[order[j]])) { x = order[j]; order[j] = order[k]; order[k] = x }
      name = order[j]
      ceiling = at_ceilings(name)
      row(name, flop[name], bytes[name], ceiling, ms[name])
      all_flop += flop[name]; all_bytes += bytes[name]; all_ceiling += ceiling; all += ms[name]
    }
    row("all kernels", all_flop, all_bytes, all_ceiling, all)
    printf "%-28s %9s %9s %9s %9.2f %7.2f\n", "step", "", "", "", span, 100
    print "\nin the rest (above 0.1 % of the step):"
    for (j = 1; j <= 8; ++j) {
      x = ""
      for (key in names) if (index(key, "rest" SUBSEP) == 1 && (x == "" || by_name[key] > by_name[x])) x = key
      if (x == "" || by_name[x] < span / 1000) break
      printf "%9.2f ms  %.120s\n", by_name[x], names[x]
      delete names[x]
    }
  }'

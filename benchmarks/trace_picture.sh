#!/usr/bin/env bash
# A piece of a step as a picture: what each GPU computes, and what travels meanwhile.
#   benchmarks/trace_picture.sh FROM_MS LENGTH_MS TRACE... >picture.svg
# TRACE: trace-rankN.json of a run with profile.steps=[N,N], or the same compressed by gzip; one row each.
# FROM_MS counts from the first kernel of the first trace. Needs jq.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,5p' "$0"; exit 2; }
from=$1 length=$2 first= row=0
shift 2
for trace in "$@"; do
  kernels=$(gzip -cdf "$trace" | jq -r '.traceEvents[]
    | select(.ph == "X" and (.cat == "kernel" or .cat == "gpu_memcpy" or .cat == "gpu_memset"))
    | [.ts, .dur, .name] | @tsv' | sort -g)
  first=${first:-$(head -n 1 <<<"$kernels" | cut -f1)}
  awk -F'\t' -v OFS='\t' -v first="$first" -v from="$from" -v length_ms="$length" -v row="$((row++))" '
    { begin = ($1 - first) / 1000 - from; end = begin + $2 / 1000 }
    end > 0 && begin < length_ms { print row, (begin < 0 ? 0 : begin), (end > length_ms ? length_ms : end), $3 }
  ' <<<"$kernels"
done | awk -F'\t' -v from="$from" -v length_ms="$length" '
  function kind(name) {
    if (name ~ /^nccl/) return 1
    if (name ~ /fprop|bprop|flash|fmha/) return 2
    if (name ~ /GroupProblem|weight_gradient/) return 3
    if (name ~ /nvjet|gemm|cutlass/) return 4
    return 5
  }
  BEGIN {
    split("#d1495b #30638e #00798c #8fb8de #b9b9b9", color, " ")
    split("travels (NCCL)|attention|experts|other matrix products|the rest", label, "|")
    width = 1100; left = 70; scale = width / length_ms
  }
  {
    k = kind($4)
    top = 40 + $1 * 76 + (k == 1 ? 34 : 0)
    if ($1 + 1 > rows) rows = $1 + 1
    boxes = boxes sprintf("<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"30\" fill=\"%s\"/>\n",
      left + $2 * scale, top, ($3 - $2) * scale, color[k])
  }
  END {
    height = 40 + rows * 76 + 60
    printf "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" font-size=\"13\">\n", left + width + 20, height
    printf "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n%s", boxes
    for (r = 0; r < rows; ++r)
      printf "<text x=\"8\" y=\"%d\">GPU %d</text>\n", 60 + r * 76, r
    step = length_ms > 20 ? 5 : length_ms > 8 ? 2 : 1
    for (t = 0; t <= length_ms; t += step) {
      x = left + t * scale
      printf "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"34\" y2=\"%d\" stroke=\"#000\" stroke-opacity=\"0.15\"/>\n", x, x, height - 54
      printf "<text x=\"%.1f\" y=\"26\" text-anchor=\"middle\">%g ms</text>\n", x, from + t
    }
    for (k = 1; k <= 5; ++k) {
      x = left + (k - 1) * 190
      printf "<rect x=\"%d\" y=\"%d\" width=\"14\" height=\"14\" fill=\"%s\"/><text x=\"%d\" y=\"%d\">%s</text>\n", x, height - 34, color[k], x + 20, height - 22, label[k]
    }
    print "</svg>"
  }'

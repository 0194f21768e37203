#!/usr/bin/env bash
# Two results of `benchmarks/gpu.sh bench` beside each other; needs no GPU.
#   benchmarks/compare_bench.sh OLD.json NEW.json
# Prints every figure, then what is slower (steps by more than 3 %, operators by more than 5 %), what uses more memory
# (more than 0.5 %) and what was not measured. Exits with 0, with 1 if anything is slower or was not measured, and with 2
# if a file cannot be read. In brackets and not judged: the start of a run, which is files and caches, and operators with
# so little work (below 10 us at the ceilings) that the launch is what is timed.
set -uo pipefail
[ $# = 2 ] || { sed -n '3s/^# *//p' "$0"; exit 2; }
reader=$(dirname "${BASH_SOURCE[0]}")/json.awk

# FILE -> lines "what<tab>value", with a row's name in the place of its number.
rows() {
  local flat
  [ -r "$1" ] || { echo "compare_bench: cannot read $1" >&2; return 1; }
  flat=$(awk -f "$reader" "$1") || { echo "compare_bench: $1 is damaged (see above)" >&2; return 1; }
  awk -F'\t' -v OFS='\t' '
    !match($1, /^(steps|operators)[.][0-9]+[.]/) { print "about." $1, $2; next }
    { row = substr($1, 1, RLENGTH - 1); field = substr($1, RLENGTH + 1) }
    field == "name" || field == "shape" { title[row] = title[row] (field == "shape" ? ", " : "") $2 }
    { order[++n] = row; fields[n] = field; values[n] = $2 }
    END {
      for (i = 1; i <= n; ++i)
        if (title[order[i]] != "") print substr(order[i], 1, 1) "." title[order[i]] "." fields[i], values[i]
      if (!n) { print "it holds neither steps nor operators" >"/dev/stderr"; exit 1 }
    }' <<<"$flat" || { echo "compare_bench: $1 is no result of gpu.sh bench" >&2; return 1; }
}

old=$(rows "$1") && new=$(rows "$2") || exit 2
awk -F'\t' '
  function number(x) { return x ~ /^[0-9.]+([eE][-+]?[0-9]+)?$/ && x > 0 }
  # One figure of both files; slower is worse above `limit`, as is more memory; limit 0: not judged.
  function figure(title, key, limit, worse,    ratio, a, b, judged) {
    a = old[key]; b = new[key]
    if (!number(a) && !number(b)) return
    judged = limit && !((key_of "ceiling_ms") in old && old[key_of "ceiling_ms"] < 0.01)
    if (!number(a)) return line(title, "-", sprintf("%.4g", b), "new")
    if (!number(b)) {
      if (judged) missing[++lost] = title
      return line(title, sprintf("%.4g", a), "-", "not measured")
    }
    ratio = b / a
    line(title, sprintf("%.4g", a), sprintf("%.4g", b), sprintf(judged ? "%.3f" : "(%.3f)", ratio))
    if (!judged) return
    if (ratio > 1 + limit) bad[worse, ++count[worse]] = sprintf("%s: %.1f %%", title, 100 * (ratio - 1))
    if (ratio < 1 - limit) bad["faster", ++count["faster"]] = sprintf("%s: %.1f %%", title, 100 * (1 - ratio))
  }
  function line(title, a, b, ratio) { printf "%-64s %10s %10s  %s\n", title, a, b, ratio }
  function list(heading, what,    i) {
    if (!count[what]) return
    print heading
    for (i = 1; i <= count[what]; ++i) print "  " bad[what, i]
  }
  {
    if (FNR == NR) old[$1] = $2; else new[$1] = $2
    if ($1 !~ /^[so][.]/) next
    key = $1
    sub(/[.][a-z_]*$/, ".", key)
    if (!(key in seen)) { seen[key] = 1; keys[++n] = key }
  }
  END {
    split("date device driver commit note", about, " ")
    for (i = 1; i <= 5; ++i)
      for (j = 0; j < 2; ++j) {
        x = j ? new["about." about[i]] : old["about." about[i]]
        if (x != "") printf "%-7s %-7s %s\n", (j ? "now" : "record"), about[i], x
      }
    if (old["about.device"] != new["about.device"]) print "These are different devices: the ratios compare machines."
    line("\n" sprintf("%-63s", "what"), "record", "now", "ratio")
    for (i = 1; i <= n; ++i) {
      key_of = keys[i]
      title = substr(key_of, 3, length(key_of) - 3)
      if (key_of ~ /^s/) {
        figure(title ", s a step", key_of "seconds", 0.03, "slower")
        figure(title ", GiB at the peak", key_of "memory_gib", 0.005, "memory")
        figure(title ", s to the end of step 1", key_of "first_step_seconds", 0, "")
      } else {
        figure(title ", ms", key_of "ms", 0.05, "slower")
      }
    }
    print ""
    list("slower:", "slower")
    list("more memory:", "memory")
    list("faster, or less memory:", "faster")
    if (lost) print "in the record but not measured:"
    for (i = 1; i <= lost; ++i) print "  " missing[i]
    if (!count["slower"] && !lost) print "nothing is slower than the record"
    exit count["slower"] || lost ? 1 : 0
  }' <(printf '%s\n' "$old") <(printf '%s\n' "$new")

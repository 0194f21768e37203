# Reads what `pithtrain schedule` prints and times it anew (engine/schedule.cpp, simulate): chunks="4,3,..." layers of 2 P chunks,
# head and share in a layer's forward. Prints how long the step is and the idle share of each stage: 51.3 [0.1,0.1].
BEGIN { ranks = 0 }
/^  / { for (i = 1; i <= NF; i++) action[ranks, i] = $i; count[ranks++] = NF }
END {
  split(chunks, layers, /,/)
  if (ranks != P) { print "1 []"; exit }
  do {
    moved = 0
    for (r = 0; r < P; r++)
      for (; at[r] < count[r]; at[r]++) {
        n = split(action[r, at[r] + 1], pass, "|"); begin = free[r] + 0; cost = 0; ready = 1
        for (i = 1; i <= n; i++) {
          kind[i] = substr(pass[i], 1, 1); split(substr(pass[i], 2), word, ":")
          micro[i] = word[2]; chunk = word[1] == 0 ? r : 2 * P - 1 - r; size = layers[chunk + 1]
          # Stations on a micro-batch's way: the chunks forward, the shared head, the chunks back.
          station[i] = kind[i] == "H" ? 2 * P : kind[i] == "F" ? chunk : 4 * P - chunk
          cost += kind[i] == "H" ? head * share : kind[i] == "B" ? 2 * size : size
          if (kind[i] == "F" && chunk == 2 * P - 1) cost += head * (1 - share)
          if (kind[i] == "W" || station[i] == 0) continue
          from = (kind[i] == "H" ? "head" : station[i] - 1) SUBSEP micro[i]
          if (!(from in left)) ready = 0; else if (left[from] > begin) begin = left[from]
        }
        if (!ready) break
        for (i = 1; i <= n; i++) {
          if (kind[i] == "W") continue
          left[station[i], micro[i]] = begin + cost
          if (station[i] == 2 * P - 1) {
            left["head", micro[i]] = begin + cost - head * (1 - share)
            if (share == 0) left[2 * P, micro[i]] = begin + cost
          }
        }
        free[r] = begin + cost; work[r] += cost; moved = 1
        if (free[r] > makespan) makespan = free[r]
      }
  } while (moved)
  for (r = 0; r < P; r++) text = text (r ? "," : "") sprintf("%.4f", 1 - work[r] / makespan)
  print makespan, "[" text "]"
}

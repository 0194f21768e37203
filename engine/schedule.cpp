#include "engine/schedule.h"

#include "core/error.h"

namespace pith {
namespace {

using Kind = Action::Kind;

// Chunk of the whole model that rank r holds as its chunk 0 or 1.
int64_t global_chunk(int64_t ranks, int64_t rank, int chunk) {
  return chunk == 0 ? rank : 2 * ranks - 1 - rank;
}

bool runs_forward(const Action& action) {
  return action.kind == Kind::forward || action.kind == Kind::overlapped;
}
bool runs_backward(const Action& action) {
  return action.kind != Kind::forward && action.kind != Kind::weight;
}
// Which (chunk, micro-batch) the backward half of an action is about.
std::pair<int, int64_t> backward_of(const Action& action) {
  if (action.kind == Kind::overlapped) return {action.backward_chunk, action.backward_microbatch};
  return {action.chunk, action.microbatch};
}

// Builds one rank's list, counting micro-batches by itself.
struct Builder {
  std::vector<Action> actions;
  std::array<int64_t, 2> forwards{}, backwards{};
  std::vector<std::pair<int, int64_t>> put_off;
  size_t weights_done = 0;

  void forward(int chunk) {
    actions.push_back({Kind::forward, chunk, forwards[static_cast<size_t>(chunk)]++});
  }
  void backward(int chunk, bool put_off_weight = false) {
    const int64_t microbatch = backwards[static_cast<size_t>(chunk)]++;
    actions.push_back({put_off_weight ? Kind::backward_input : Kind::backward, chunk, microbatch});
    if (put_off_weight) put_off.emplace_back(chunk, microbatch);
  }
  void weight() {
    const auto& [chunk, microbatch] = put_off[weights_done++];
    actions.push_back({Kind::weight, chunk, microbatch});
  }
  void overlapped(int forward_chunk, int backward_chunk) {
    const auto f = static_cast<size_t>(forward_chunk), b = static_cast<size_t>(backward_chunk);
    actions.push_back(
        {Kind::overlapped, forward_chunk, forwards[f]++, backward_chunk, backwards[b]++});
  }
};

double cost_of(
    const Action& action, const std::vector<StageCosts>& costs, int64_t ranks, int64_t rank) {
  const StageCosts& own = costs[static_cast<size_t>(global_chunk(ranks, rank, action.chunk))];
  switch (action.kind) {
    case Kind::forward:
      return own.forward;
    case Kind::backward:
      return own.backward_input + own.weight;
    case Kind::backward_input:
      return own.backward_input;
    case Kind::weight:
      return own.weight;
    case Kind::overlapped:
      break;
  }
  const StageCosts& other =
      costs[static_cast<size_t>(global_chunk(ranks, rank, action.backward_chunk))];
  return own.forward + other.backward_input + other.weight - std::min(own.hidden, other.hidden);
}

std::string label_of(const Action& action) {
  const auto one = [](const char* kind, int chunk, int64_t microbatch) {
    return fmt::format("{}{}:{}", kind, chunk, microbatch);
  };
  switch (action.kind) {
    case Kind::forward:
      return one("F", action.chunk, action.microbatch);
    case Kind::backward:
      return one("B", action.chunk, action.microbatch);
    case Kind::backward_input:
      return one("I", action.chunk, action.microbatch);
    case Kind::weight:
      return one("W", action.chunk, action.microbatch);
    case Kind::overlapped:
      break;
  }
  return fmt::format("{}|{}", one("F", action.chunk, action.microbatch),
      one("B", action.backward_chunk, action.backward_microbatch));
}

}  // namespace

std::vector<Action> make_schedule(int64_t ranks, int64_t rank, int64_t n, bool overlap) {
  PITH_CHECK(ranks >= 1 && rank >= 0 && rank < ranks, "schedule of rank {} of {}", rank, ranks);
  PITH_CHECK(n >= 1, "a step needs at least one micro-batch");
  if (ranks > 1 && n < 2 * ranks) {
    PITH_FAIL_HINT("raise training.global_batch or lower training.micro_batch",
        "a pipeline of {} ranks needs at least {} micro-batches a step, there are {}", ranks,
        2 * ranks, n);
  }
  Builder b;
  if (ranks == 1 && !overlap) {
    for (int64_t i = 0; i < n; ++i) b.forward(0), b.forward(1), b.backward(1), b.backward(0);
    return b.actions;
  }
  const int64_t after = ranks - 1 - rank;  // ranks between this one and the turn of the V
  for (int64_t i = 0; i < 2 * after; ++i) b.forward(0);
  for (int64_t i = 0; i <= rank; ++i) b.forward(0), b.forward(1);
  for (int64_t i = 0; i < after; ++i) b.backward(1, true), b.weight(), b.forward(1);
  for (int64_t i = 0; i < n - 2 * ranks + rank + 1; ++i) {
    b.overlapped(0, 1);
    b.overlapped(1, 0);
  }
  for (int64_t i = 0; i < after; ++i) b.backward(1), b.overlapped(1, 0);
  // The last backwards put off their weight gradients, which then fill the wait for the gradients
  // of the next rank.
  bool put_off = false;
  for (int64_t i = 0; i <= rank; ++i) {
    if (i == (rank + 1) / 2 && rank % 2 == 1) put_off = true;
    b.backward(1, put_off);
    if (i == (rank + 1) / 2 && rank % 2 == 0) put_off = true;
    b.backward(0, put_off);
  }
  for (int64_t i = 0; i < after; ++i) b.weight(), b.backward(0, true);
  while (b.weights_done < b.put_off.size()) b.weight();
  return b.actions;
}

std::vector<Action> forward_schedule(int64_t n) {
  std::vector<Action> actions;
  for (int64_t i = 0; i < n; ++i)
    for (const int chunk : {0, 1}) actions.push_back({Kind::forward, chunk, i});
  return actions;
}

std::string to_string(const std::vector<Action>& schedule) {
  std::string text;
  for (const Action& action : schedule) {
    if (!text.empty()) text += ' ';
    text += label_of(action);
  }
  return text;
}

Simulation simulate(int64_t ranks, int64_t n, bool overlap, const std::vector<StageCosts>& costs) {
  PITH_CHECK(costs.size() == static_cast<size_t>(2 * ranks),
      "simulate: {} chunk costs for {} ranks, expected {}", costs.size(), ranks, 2 * ranks);
  constexpr double kNever = -1;
  Simulation result;
  const auto count = static_cast<size_t>(ranks);
  result.intervals.resize(count);
  std::vector<double> free_at(count, 0), work(count, 0);
  std::vector<int64_t> kept(count, 0);
  result.peak_activations.assign(count, 0);
  const std::vector<double> never(static_cast<size_t>(n), kNever);
  // When the forward or backward of (chunk of the whole model, micro-batch) is over.
  std::vector<std::vector<double>> forward_end(2 * count, never), backward_end(2 * count, never);
  for (int64_t rank = 0; rank < ranks; ++rank)
    result.actions.push_back(make_schedule(ranks, rank, n, overlap));

  for (bool moved = true; moved;) {
    moved = false;
    for (size_t r = 0; r < count; ++r) {
      while (result.intervals[r].size() < result.actions[r].size()) {
        const Action& action = result.actions[r][result.intervals[r].size()];
        double begin = free_at[r];
        bool ready = true;
        const auto wait_for = [&](double end) {
          ready = ready && end != kNever;
          begin = std::max(begin, end);
        };
        const auto f =
            static_cast<size_t>(global_chunk(ranks, static_cast<int64_t>(r), action.chunk));
        const auto [local, microbatch] = backward_of(action);
        const auto b = static_cast<size_t>(global_chunk(ranks, static_cast<int64_t>(r), local));
        const auto m = static_cast<size_t>(action.microbatch), bm = static_cast<size_t>(microbatch);
        if (runs_forward(action) && f > 0) wait_for(forward_end[f - 1][m]);
        if (runs_backward(action))
          wait_for(b + 1 == 2 * count ? forward_end[b][bm] : backward_end[b + 1][bm]);
        if (!ready) break;
        const double cost = cost_of(action, costs, ranks, static_cast<int64_t>(r));
        const double end = begin + cost;
        if (runs_forward(action)) {
          forward_end[f][m] = end;
          result.peak_activations[r] = std::max(result.peak_activations[r], ++kept[r]);
        }
        if (runs_backward(action)) backward_end[b][bm] = end, --kept[r];
        result.intervals[r].push_back({begin, end});
        free_at[r] = end;
        work[r] += cost;
        result.makespan = std::max(result.makespan, end);
        moved = true;
      }
    }
  }
  for (size_t r = 0; r < count; ++r) {
    PITH_CHECK(result.intervals[r].size() == result.actions[r].size(),
        "the schedules of {} ranks wait for each other: rank {} stops before {}", ranks, r,
        label_of(result.actions[r][result.intervals[r].size()]));
    result.bubble.push_back(result.makespan - work[r]);
  }
  return result;
}

std::string draw_text(const Simulation& simulation, size_t columns) {
  std::string text;
  const double scale = static_cast<double>(columns) / simulation.makespan;
  for (size_t r = 0; r < simulation.actions.size(); ++r) {
    std::string line(columns, '.');
    for (size_t i = 0; i < simulation.actions[r].size(); ++i) {
      const Action& action = simulation.actions[r][i];
      const auto [begin, end] = simulation.intervals[r][i];
      const char* letters = action.kind == Kind::forward      ? "F"
                            : action.kind == Kind::weight     ? "W"
                            : action.kind == Kind::overlapped ? "x"
                                                              : "B";
      const auto first = static_cast<size_t>(std::lround(begin * scale));
      const auto last = std::min(columns, static_cast<size_t>(std::lround(end * scale)));
      for (size_t c = first; c < last; ++c) line[c] = letters[0];
      if (first < last && action.chunk == 1 && action.kind != Kind::overlapped)
        line[first] = static_cast<char>(std::tolower(line[first]));
    }
    text += fmt::format("rank {:>2} |{}|\n", r, line);
  }
  return text;
}

std::string draw_svg(const Simulation& simulation) {
  constexpr double kWidth = 1200, kRow = 26;
  const double scale = kWidth / simulation.makespan;
  const auto height = kRow * static_cast<double>(simulation.actions.size()) + 24;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:.0f}\" height=\"{:.0f}\" "
      "font-family=\"monospace\" font-size=\"9\">\n",
      kWidth + 60, height);
  const auto box = [&](double begin, double end, double y, double h, const char* color,
                       const std::string& label) {
    svg += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\" "
        "stroke=\"white\"/>",
        55 + begin * scale, y, (end - begin) * scale, h, color);
    if ((end - begin) * scale > 14)
      svg += fmt::format(
          "<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", 57 + begin * scale, y + h / 2 + 3, label);
    svg += '\n';
  };
  for (size_t r = 0; r < simulation.actions.size(); ++r) {
    const double y = 4 + kRow * static_cast<double>(r);
    svg += fmt::format("<text x=\"2\" y=\"{:.1f}\">rank {}</text>\n", y + kRow / 2 + 3, r);
    for (size_t i = 0; i < simulation.actions[r].size(); ++i) {
      const Action& action = simulation.actions[r][i];
      const auto [begin, end] = simulation.intervals[r][i];
      const char* forward = action.chunk == 0 ? "#f5c26b" : "#f3dfa2";
      const char* backward = backward_of(action).first == 0 ? "#7fb3d5" : "#b3d4ea";
      if (action.kind == Kind::overlapped) {
        box(begin, end, y, kRow / 2 - 1, forward, fmt::format("{}", action.microbatch));
        box(begin, end, y + kRow / 2 - 1, kRow / 2 - 1, backward,
            fmt::format("{}", action.backward_microbatch));
      } else {
        const char* color = action.kind == Kind::forward  ? forward
                            : action.kind == Kind::weight ? "#9cc79c"
                                                          : backward;
        box(begin, end, y, kRow - 2, color, fmt::format("{}", action.microbatch));
      }
    }
  }
  svg += fmt::format(
      "<text x=\"55\" y=\"{:.1f}\">yellow forward, blue backward, green weight gradients; dark "
      "chunk r, light chunk 2P-1-r; halves: a forward against a backward</text>\n</svg>\n",
      height - 6);
  return svg;
}

std::vector<int64_t> balance_chunks(
    int64_t ranks, const std::vector<double>& layer_cost, double head_cost) {
  const auto chunks = static_cast<size_t>(2 * ranks);
  const auto layers = static_cast<int64_t>(layer_cost.size());
  // The step of a long run takes as long as the slowest pair of the main phase and the bubble.
  const auto step_time = [&](const std::vector<int64_t>& counts) {
    std::vector<StageCosts> costs(chunks);
    size_t layer = 0;
    for (size_t c = 0; c < chunks; ++c) {
      double sum = 0;
      for (int64_t i = 0; i < counts[c]; ++i) sum += layer_cost[layer++];
      costs[c] = {sum, sum, sum, 0};
      if (c + 1 == chunks) costs[c].forward += 3 * head_cost;  // its gradient is made there too
    }
    return simulate(ranks, 4 * ranks, ranks > 1, costs).makespan;
  };
  std::vector<int64_t> best(chunks, layers / static_cast<int64_t>(chunks));
  for (size_t c = 0; c < static_cast<size_t>(layers % static_cast<int64_t>(chunks)); ++c) ++best[c];
  double best_time = step_time(best);
  for (bool improved = true; improved;) {  // moves single layers while that helps
    improved = false;
    const std::vector<int64_t> start = best;
    for (size_t from = 0; from < chunks; ++from) {
      for (size_t to = 0; to < chunks; ++to) {
        if (from == to || start[from] == 0) continue;
        std::vector<int64_t> moved = start;
        --moved[from], ++moved[to];
        const double time = step_time(moved);
        if (time < best_time - 1e-9) best_time = time, best = moved, improved = true;
      }
    }
  }
  return best;
}

}  // namespace pith

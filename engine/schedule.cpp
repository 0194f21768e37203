#include "engine/schedule.h"

namespace pith {
namespace {
// Chunk of the whole model that a pass of rank r is about.
size_t chunk_of(int64_t ranks, size_t rank, const Pass& pass) {
  return pass.chunk == 0 ? rank : 2 * index(ranks) - 1 - rank;
}

// Builds one rank's list, counting micro-batches by itself.
struct Builder {
  vector<Action> actions;
  int64_t forwards[2] = {}, backwards[2] = {};
  deque<Pass> put_off;

  Pass next_forward(int chunk) { return {Pass::forward, chunk, forwards[chunk]++}; }
  void forward(int chunk) { actions.push_back({next_forward(chunk)}); }
  void backward(int chunk, bool put_off_weight = false) {
    const int64_t microbatch = backwards[chunk]++;
    actions.push_back(
      {{put_off_weight ? Pass::backward_input : Pass::backward, chunk, microbatch}});
    if (put_off_weight) put_off.push_back({Pass::weight, chunk, microbatch});
  }
  void weight() {
    actions.push_back({put_off.front()});
    put_off.pop_front();
  }
  void overlapped(int chunk, int backward_chunk) {
    backward(backward_chunk);
    actions.back().insert(actions.back().begin(), next_forward(chunk));
  }
};

// Rank 1's list with its share of the head: of each micro-batch one action after the forward that
// leads there, by when the last chunk has come to its head.
vector<Action> with_head(const vector<Action>& actions) {
  vector<Action> all;
  optional<Pass> waiting;
  for (const Action& action: actions) {
    all.push_back(action);
    if (waiting) all.push_back({*exchange(waiting, {})});
    for (const Pass& pass: action)
      if (pass.kind == Pass::forward && pass.chunk == 1) waiting = {Pass::head, 1, pass.microbatch};
  }
  if (waiting) all.push_back({*waiting});
  return all;
}

double cost_of(const Action& action, const vector<StageCosts>& costs, HeadCosts head, int64_t ranks,
  size_t rank) {
  double sum = 0, hidden = numeric_limits<double>::infinity();
  for (const Pass& pass: action) {
    if (pass.kind == Pass::head) return head.cost * head.share;
    const size_t chunk = chunk_of(ranks, rank, pass);
    const StageCosts& own = costs[chunk];
    if (pass.kind == Pass::forward && chunk + 1 == costs.size())
      sum += head.cost * (1 - head.share);
    if (pass.kind == Pass::forward) sum += own.forward;
    if (pass.kind == Pass::backward || pass.kind == Pass::backward_input) sum += own.backward_input;
    if (pass.kind == Pass::backward || pass.kind == Pass::weight) sum += own.weight;
    hidden = min(hidden, own.hidden);
  }
  return action.size() > 1 ? sum - hidden : sum;
}
}

vector<Action> make_schedule(
  int64_t ranks, int64_t rank, int64_t n, bool overlap, bool shared_head) {
  PITH_CHECK(n >= 1, "a step needs at least one micro-batch");
  if (ranks > 1 && n < 2 * ranks)
    PITH_FAIL_HINT("raise training.global_batch or lower training.micro_batch",
      "a pipeline of {} ranks needs at least {} micro-batches a step, there are {}", ranks,
      2 * ranks, n);
  Builder b;
  if (ranks == 1 && !overlap) {
    for (int64_t i = 0; i < n; ++i) b.forward(0), b.forward(1), b.backward(1), b.backward(0);
    return b.actions;
  }
  const int64_t after = ranks - 1 - rank; // ranks between this one and the turn of the V
  for (int64_t i = 0; i < 2 * after; ++i) b.forward(0);
  for (int64_t i = 0; i <= rank; ++i) b.forward(0), b.forward(1);
  for (int64_t i = 0; i < after; ++i) b.backward(1, true), b.weight(), b.forward(1);
  for (int64_t i = 0; i < n - 2 * ranks + rank + 1; ++i) b.overlapped(0, 1), b.overlapped(1, 0);
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
  while (!b.put_off.empty()) b.weight();
  return shared_head && rank == 1 ? with_head(b.actions) : b.actions;
}

vector<Action> forward_schedule(int64_t n) {
  vector<Action> actions;
  for (int64_t i = 0; i < n; ++i)
    for (const int chunk: {0, 1}) actions.push_back({{Pass::forward, chunk, i}});
  return actions;
}

string to_string(const vector<Action>& schedule) {
  string text;
  for (const Action& action: schedule) {
    if (!text.empty()) text += ' ';
    for (const Pass& pass: action)
      text += fmt::format("{}{:c}{}:{}", &pass == &action[0] ? "" : "|", char(pass.kind),
        pass.chunk, pass.microbatch);
  }
  return text;
}

Simulation simulate(
  int64_t ranks, int64_t n, bool overlap, const vector<StageCosts>& costs, HeadCosts head) {
  constexpr double kNever = numeric_limits<double>::infinity();
  const auto count = index(ranks);
  Simulation result;
  result.intervals.resize(count);
  result.peak_activations.assign(count, 0);
  vector<double> free_at(count, 0), work(count, 0);
  vector<int64_t> kept(count, 0);
  for (int64_t rank = 0; rank < ranks; ++rank)
    result.actions.push_back(make_schedule(ranks, rank, n, overlap, head.share > 0));
  // When a micro-batch leaves each station of its way: the chunks forward, rank 1's share of the
  // head, the chunks in reverse back.
  vector<vector<double>> left(4 * count + 1, vector<double>(index(n), kNever));
  vector<double> at_head(index(n), kNever); // when it comes to the head

  for (bool moved = true; moved;) {
    moved = false;
    for (size_t r = 0; r < count; ++r) {
      const auto station = [&](const Pass& pass) {
        const size_t chunk = chunk_of(ranks, r, pass);
        if (pass.kind == Pass::head) return 2 * count;
        return pass.kind == Pass::forward ? chunk : 4 * count - chunk;
      };
      auto& intervals = result.intervals[r];
      for (; intervals.size() < result.actions[r].size(); moved = true) {
        const Action& action = result.actions[r][intervals.size()];
        double begin = free_at[r];
        for (const Pass& pass: action) {
          if (pass.kind == Pass::weight || station(pass) == 0) continue;
          const auto& before = pass.kind == Pass::head ? at_head : left[station(pass) - 1];
          begin = max(begin, before[index(pass.microbatch)]);
        }
        if (begin == kNever) break;
        const double cost = cost_of(action, costs, head, ranks, r);
        for (const Pass& pass: action) {
          if (pass.kind == Pass::weight) continue;
          const auto m = index(pass.microbatch);
          left[station(pass)][m] = begin + cost;
          if (station(pass) + 1 == 2 * count) {
            at_head[m] = begin + cost - head.cost * (1 - head.share);
            if (head.share == 0) left[2 * count][m] = begin + cost;
          }
          if (pass.kind == Pass::head) continue;
          kept[r] += pass.kind == Pass::forward ? 1 : -1;
          result.peak_activations[r] = max(result.peak_activations[r], kept[r]);
        }
        free_at[r] = begin + cost;
        intervals.push_back({begin, free_at[r]});
        work[r] += cost;
        result.makespan = max(result.makespan, free_at[r]);
      }
    }
  }
  for (size_t r = 0; r < count; ++r) {
    PITH_CHECK(result.intervals[r].size() == result.actions[r].size(),
      "the schedules of {} ranks wait for each other: rank {} stops before {}", ranks, r,
      to_string({result.actions[r][result.intervals[r].size()]}));
    result.bubble.push_back(result.makespan - work[r]);
  }
  return result;
}

string draw_svg(const Simulation& simulation) {
  constexpr double kWidth = 1200, kRow = 26;
  const double scale = kWidth / simulation.makespan;
  const double height = kRow * real(simulation.actions.size()) + 24;
  string svg = fmt::format(
    "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:.0f}\" height=\"{:.0f}\" "
    "font-family=\"monospace\" font-size=\"9\">\n",
    kWidth + 60, height);
  const auto write = [&](double x, double y, const string& text) {
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", x, y, text);
  };
  for (size_t r = 0; r < simulation.actions.size(); ++r) {
    const double top = 4 + kRow * real(r);
    write(2, top + kRow / 2 + 3, fmt::format("rank {}", r));
    for (size_t i = 0; i < simulation.actions[r].size(); ++i) {
      const Action& action = simulation.actions[r][i];
      const auto [begin, end] = simulation.intervals[r][i];
      const double x = 55 + begin * scale, width = (end - begin) * scale;
      const double h = (kRow - 2) / real(action.size());
      double y = top;
      for (const Pass& pass: action) {
        const bool light = pass.chunk == 1;
        const char* color = pass.kind == Pass::forward ? light ? "#f3dfa2" : "#f5c26b"
          : pass.kind == Pass::weight                  ? "#9cc79c"
          : pass.kind == Pass::head                    ? "#f5a9a9"
          : light                                      ? "#b3d4ea"
                                                       : "#7fb3d5";
        svg += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\" "
          "stroke=\"white\"/>\n",
          x, y, width, h, color);
        if (width > 14) write(x + 2, y + h / 2 + 3, to_string(pass.microbatch));
        y += h;
      }
    }
  }
  write(55, height - 6,
    "yellow forward, blue backward, green weight gradients, red head; dark chunk r, light chunk "
    "2P-1-r; halves: a forward against a backward");
  return svg + "</svg>\n";
}

vector<int64_t> balance_chunks(int64_t ranks, int64_t layers, HeadCosts head) {
  const auto chunks = index(2 * ranks);
  // The step of a long run takes as long as the slowest pair of the main phase and the bubble.
  const auto step = [&](const vector<int64_t>& counts) {
    vector<StageCosts> costs;
    for (const int64_t count: counts) costs.push_back({real(count), real(count), real(count)});
    return simulate(ranks, 4 * ranks, ranks > 1, costs, head);
  };
  vector<int64_t> best(chunks, 0);
  for (size_t layer = 0; layer < index(layers); ++layer) ++best[layer % chunks];
  Simulation now = step(best);
  for (bool improved = true; improved;) { // moves single layers off the busiest rank
    improved = false;
    const vector<int64_t> start = best;
    const auto busiest = index(ranges::min_element(now.bubble) - now.bubble.begin());
    for (const size_t from: {busiest, chunks - 1 - busiest}) {
      for (size_t to = 0; to < chunks; ++to) {
        if (from == to || start[from] == 0) continue;
        vector<int64_t> moved = start;
        --moved[from], ++moved[to];
        Simulation other = step(moved);
        if (other.makespan >= now.makespan - 1e-9) continue;
        now = std::move(other), best = moved, improved = true;
      }
    }
  }
  return best;
}
}

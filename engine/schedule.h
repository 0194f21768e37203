// The pipeline schedule as data. DualPipeV (DeepSeek-AI, "DualPipe", cut-in-half form): of P ranks,
// rank r holds chunks r and 2 P - 1 - r of the layers, so rank 0 both embedding and head.
#pragma once
namespace pith {
// One pass over (chunk, microbatch). Chunk 0 is the rank's chunk r, chunk 1 its chunk 2 P - 1 - r.
struct Pass {
  enum Kind : char {
    forward = 'F',
    backward = 'B', // input and weight gradients
    backward_input = 'I', // the same with the weight gradients put off
    weight = 'W', // the weight gradients put off by backward_input
    head = 'H', // rank 1's share of the head, forward and backward
  } kind;
  int chunk;
  int64_t microbatch;
};
// What a rank does at a time: one pass, or a forward against a backward, in this order.
using Action = vector<Pass>;

// What rank `rank` executes for n micro-batches; n >= 2 ranks where ranks > 1. Without `overlap`
// one rank finishes each micro-batch before the next begins, which keeps the activations of one.
// `shared_head`: rank 1 does a share of the head.
vector<Action> make_schedule(
  int64_t ranks, int64_t rank, int64_t n, bool overlap, bool shared_head = false);
// The forward passes alone: validation, scoring.
vector<Action> forward_schedule(int64_t n);
string to_string(const vector<Action>& schedule); // "F0:0 F1:0 F0:1|B1:0 ..."

// Time of one chunk in any unit; `hidden`: what a forward saves against a backward (the smaller of
// the two chunks' counts).
struct StageCosts {
  double forward = 1, backward_input = 1, weight = 1, hidden = 0;
};
// The head's time, forward and backward, all of it in the last chunk's forward, and rank 1's share.
struct HeadCosts {
  double cost = 0, share = 0;
};

// A simulated step: transfers take no time, an action starts when rank and input are ready.
struct Simulation {
  struct Interval {
    double begin, end;
  };
  double makespan = 0;
  vector<vector<Action>> actions; // by rank
  vector<vector<Interval>> intervals; // of these actions
  vector<double> bubble; // idle time by rank
  vector<int64_t> peak_activations; // chunks kept at once by rank
};
// costs[chunk of the whole model], 2 * ranks of them. The bubble with equal costs is
// (ranks - 1) (F&B + B - 3 W).
Simulation simulate(
  int64_t ranks, int64_t n, bool overlap, const vector<StageCosts>& costs, HeadCosts head = {});

string draw_svg(const Simulation& simulation);

// Layers of each of 2 * ranks chunks such that the simulated step is shortest, where a layer's
// forward, input and weight gradients take 1 each. A chunk may be empty.
vector<int64_t> balance_chunks(int64_t ranks, int64_t layers, HeadCosts head);
}

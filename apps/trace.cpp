// pithtrain trace: one batch through a model folder, all written down, to compare programs.
#include "apps/families.h"
#include "engine/batches.h"
#include "engine/optimizer.h"
#include "engine/pipeline.h"

namespace pith {
namespace {
struct TraceOptions : ModelOptions {
  string tokens, out;
  bool grads = false, stages = false, routing = false;
};

template <class Model> void trace(const TraceOptions& options) {
  LoadedModel<Model> loaded(options, ShardGroup::Use::training);
  auto& [device, config, model, mesh, groups] = loaded;
  const vector<Row> rows = read_token_rows(options.tokens, config.vocab_size);
  int64_t trained = 0;
  for (const Row& row: rows) trained += row.trained_tokens();
  const vector<MicroBatch> batch{make_microbatch(rows, true, trained, ssize(rows), device)};
  Pipeline<Model> pipeline(model, mesh, batch[0].max_seqlen, {0, false});

  vector<NamedTensor> written;
  const auto write = [&](const string& name, const Tensor& tensor) {
    written.emplace_back(name, tensor.to(kCPU).contiguous().clone());
  };
  if (options.stages) pipeline.observe(write);
  vector<RoutingTape> tapes(1);
  RoutingTape& tape = tapes[0];

  zero_grads(groups);
  const BatchResult result = options.grads
    ? pipeline.forward_backward(batch, NextTokenLoss(), tapes)
    : pipeline.forward_only(batch, NextTokenLoss(), {}, tapes);
  pipeline.observe({});
  const double divisor = real(max<int64_t>(trained, 1));
  write("loss", result.loss_sum / divisor);
  write("logprobs", result.per_token[0]);
  for (size_t layer = 0; options.routing && layer < tape.topk_idx.size(); ++layer) {
    if (!tape.topk_idx[layer].defined()) continue;
    write(fmt::format("routing.topk_idx.{}", layer), tape.topk_idx[layer]);
    write(fmt::format("routing.topk_weight.{}", layer), tape.topk_weight[layer]);
  }
  if (result.balance_sum.defined())
    write("balance_loss", result.balance_sum / real(batch[0].global_rows * result.num_moe_layers));
  tape.replay = true; // so that logits and loss speak of one pass
  write("logits", pipeline.forward_only(batch, AllLogits(), {}, tapes).per_token[0]);
  for (const Parameter* parameter: all_parameters(groups))
    for (const HfTensor& tensor: parameter->tensors)
      if (options.grads)
        write("grad." + tensor.name, Parameter::view_of(parameter->grad.view({-1}), tensor));
  write_safetensors(options.out, written);
  fmt::print("{}: {} tensors; loss {:.6f} over {} trained tokens\n", options.out, written.size(),
    (result.loss_sum / divisor).template item<double>(), trained);
}
}

void add_trace_command(CLI::App& app) {
  const auto [sub, o] = add_command<TraceOptions>(app, "trace",
    "Run one batch through a model folder and write logits, loss, log-probabilities, gradients",
    [](const TraceOptions& options) {
    with_family(options.folder, [&]<class Model>() { return trace<Model>(options); });
  });
  o->dtype = "fp32";
  o->add_to(*sub);
  sub->add_option("--out", o->out, "safetensors file to write")->required();
  sub
    ->add_option("--tokens", o->tokens,
      "JSON: a list of rows, each a list of documents, each a list of ids; or an object with "
      "\"rows\" and \"labels\" of the same shape (-100: not trained)")
    ->required();
  sub->add_flag("--grads", o->grads, "Write the loss's gradients as grad.NAME");
  sub->add_flag("--stages", o->stages, "Write the outputs of every layer's stages");
  sub->add_flag("--routing", o->routing, "Write expert ids and weights of every token");
  sub->footer(
    "Example: pithtrain trace runs/demo/checkpoints/step-00000300 --tokens ids.json "
    "--out trace.safetensors --grads --routing");
}
}

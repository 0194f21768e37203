#include "operators/window_attention.h"

#include "operators/function.h"
#include "operators/permute.h"

namespace pith {
namespace {

Tensor take(const Tensor& rows, const Gather& gather) {
  return permute(rows, {.row_of_slot = gather.from,
                           .slot_of = gather.places,
                           .offsets = {},
                           .offsets_host = {},
                           .num_slots = gather.from.size(0)});
}

// Rows to the ranks and from them; their gradients go the other way.
Tensor exchange(const Tensor& rows, const Halo& halo, const Comm& context) {
  const auto travel = [&context](const Tensor& in, const std::vector<int64_t>& received,
                          const std::vector<int64_t>& sent) {
    Tensor out =
        at::empty({std::reduce(received.begin(), received.end()), in.size(1)}, in.options());
    context.all_to_all_async(out, in, received, sent).wait();
    return out;
  };
  return record(
      travel(rows.detach(), halo.received, halo.send), {rows}, [travel, &halo](const Tensor& dout) {
        return Tensors{travel(dout.contiguous(), halo.send, halo.received)};
      });
}

}  // namespace

Tensor window_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Halo& halo,
    double scale, const AttentionOptions& options, const Comm& context) {
  check_attention(q, k, v);
  PITH_CHECK(halo.window == options.window && halo.sent.places.size(0) == q.size(0) &&
                 std::ssize(halo.send) == context.size(),
      "window_attention: {} tokens and a window of {} on {} ranks, but the micro-batch was split "
      "for a window of {} on {} ranks",
      q.size(0), options.window, context.size(), halo.window, halo.send.size());
  const Tensor own = at::cat({k, v}, 2).flatten(1);  // (T, Hkv (D + Dv))
  const Tensor all = take(exchange(take(own, halo.sent), halo, context), halo.keys)
                         .view({-1, k.size(1), k.size(2) + v.size(2)});
  return attention(q, all.narrow(2, 0, k.size(2)), all.narrow(2, k.size(2), v.size(2)), halo.span,
      scale, options);
}

}  // namespace pith

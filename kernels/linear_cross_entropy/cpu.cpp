// Cross-entropy of rows of logits and its gradient on a CPU, one row after the other while it is in a cache.

#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "native.h"

namespace reedling {
namespace {

struct Options {
  double smoothing, z_loss, cap;  // cap 0: none
};

// Loss of a row of n logits x; with `grad` x becomes the loss's gradient. `capped` has room for n.
template <typename A>
A row_loss(A* x, A* capped, int64_t n, int64_t label, const Options& options, bool grad) {
  using V = Vectorized<A>;
  const A cap = options.cap, smoothing = options.smoothing, z_loss = options.z_loss;
  if (cap != 0) {
    at::vec::map<A>([=](V v) { return (v / V(cap)).tanh() * V(cap); }, x, x, n);
    std::copy_n(x, n, capped);
  }
  const A chosen = x[label], mean = smoothing != 0 ? sum(x, n) / n : A(0);
  const A most = largest<A>(x, n, 1);
  exponentials<A>(x, n, 1, most);
  const A total = sum(x, n), lse = most + std::log(total);
  const A loss = z_loss * lse * lse - (1 - smoothing) * (chosen - lse) - (smoothing != 0 ? smoothing * (mean - lse) : A(0));
  if (!grad) return loss;
  const A factor = (1 + 2 * z_loss * lse) / total, even = smoothing / n;
  at::vec::map<A>([=](V v) { return v * V(factor) - V(even); }, x, x, n);
  x[label] -= 1 - smoothing;
  if (cap != 0)
    at::vec::map2<A>([=](V g, V y) { const V tanh = y / V(cap); return g * (V(1) - tanh * tanh); }, x, x, capped, n);
  return loss;
}

Tensor cross_entropy_(const Tensor& logits_RV, const Tensor& labels_R, int64_t ignore_index, double label_smoothing, double z_loss,
                      std::optional<double> soft_cap, bool grad) {
  const int64_t n = logits_RV.size(1);
  const Options options{label_smoothing, z_loss, soft_cap.value_or(0)};
  const Tensor losses = at::zeros({logits_RV.size(0)}, logits_RV.options().dtype(wide_type(logits_RV)));
  const int64_t* label = labels_R.const_data_ptr<int64_t>();
  REEDLING_FLOATING_TYPES(logits_RV.scalar_type(), "cross_entropy_", [&] {
    using A = Wide<scalar_t>;
    at::parallel_for(0, logits_RV.size(0), 1, [&](int64_t begin, int64_t end) {
      WideRow<scalar_t> wide;
      std::vector<A> capped(options.cap != 0 ? n : 0);
      for (int64_t r = begin; r < end; ++r) {
        scalar_t* logits = mutable_row<scalar_t>(logits_RV, r);
        if (label[r] == ignore_index) {
          std::fill_n(logits, n, scalar_t(0));
          continue;
        }
        TORCH_CHECK_INDEX(label[r] >= 0 && label[r] < n, "label ", label[r], " is outside the vocabulary of ", n, " tokens");
        losses.mutable_data_ptr<A>()[r] = row_loss<A>(wide.read(logits, n), capped.data(), n, label[r], options, grad);
        wide.write(logits, n);
      }
    });
  });
  return losses.sum();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reedling_cpu, library) {
  library.def("cross_entropy_(Tensor(a!) logits, Tensor labels, int ignore_index, float label_smoothing, float z_loss, float? soft_cap, "
              "bool grad) -> Tensor");
}

TORCH_LIBRARY_IMPL(reedling_cpu, CPU, library) {
  library.impl("cross_entropy_", cross_entropy_);
}

}  // namespace reedling

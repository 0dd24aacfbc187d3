// Attention on a CPU: some query rows of a document at a time with all keys that they see, documents and heads on the threads side by side.
// The backward pass computes weights again.

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "native.h"

namespace reedling {
namespace {

constexpr int64_t kFar = int64_t{1} << 40;  // keys, more than there are

// Query rows at a time: few leave out more of what a causal row does not see, many make larger products, which 16 bits need more.
template <typename T>
constexpr int64_t kRows = sizeof(T) == 2 ? 128 : 64;

// Its rows and the keys that they see; the last row sits at the last key.
struct Document {
  int64_t start, end, key_start, key_end;
};

// Which keys a row of a document sees, and the first row that sees one.
struct Sight {
  bool causal;
  int64_t window;  // kFar: none

  Sight(bool causal, std::optional<int64_t> window) : causal(causal), window(std::min(window.value_or(kFar), kFar)) {
    TORCH_CHECK_VALUE(this->window > 0, "a window of ", this->window, " holds no key");
  }

  int64_t ahead() const { return causal ? 0 : window == kFar ? kFar : window - 1; }
  int64_t first(const Document& d, int64_t row) const { return std::max(d.key_start, row + d.key_end - d.end - window + 1); }
  int64_t end(const Document& d, int64_t row) const { return std::min(d.key_end, row + d.key_end - d.end + ahead() + 1); }
  int64_t first_row(const Document& d) const {
    return d.key_start < d.key_end ? std::max(d.start, d.key_start - d.key_end + d.end - ahead()) : d.end;
  }
};

// Raises what would otherwise be read beyond its end: a head that has no group, a row or key that is not there; and ranges of keys out of
// order, to whose gradients two threads could add.
std::vector<Document> documents(const Tensor& q_TNH, const Tensor& k_SGH, const Tensor& v_SGH, const Tensor& bounds_U1,
                                const std::optional<Tensor>& keys_2U) {
  TORCH_CHECK_VALUE(k_SGH.sizes() == v_SGH.sizes() && q_TNH.size(2) == k_SGH.size(2) && k_SGH.size(1) > 0 && q_TNH.size(1) % k_SGH.size(1) == 0,
                    "q ", q_TNH.sizes(), ", k ", k_SGH.sizes(), " and v ", v_SGH.sizes(), " do not fit one another");
  const Tensor b = bounds_U1.to(at::kLong).contiguous(), k = keys_2U ? keys_2U->to(at::kLong).contiguous() : Tensor();
  const int64_t n = b.numel() - 1, *row = b.const_data_ptr<int64_t>(), *key = keys_2U ? k.const_data_ptr<int64_t>() : nullptr;
  TORCH_CHECK_VALUE(!keys_2U || k.numel() == 2 * n, "keys ", k.sizes(), " are not a range for each of ", n, " documents");
  std::vector<Document> all;
  for (int64_t i = 0; i < n; ++i) {
    const Document d{row[i], row[i + 1], key ? key[i] : row[i], key ? key[n + i] : row[i + 1]};
    TORCH_CHECK_VALUE(0 <= d.start && d.start <= d.end && d.end <= q_TNH.size(0) && 0 <= d.key_start && d.key_start <= d.key_end &&
                          d.key_end <= k_SGH.size(0),
                      "document ", i, " has rows ", d.start, " to ", d.end, " and keys ", d.key_start, " to ", d.key_end, ", of ",
                      q_TNH.size(0), " and ", k_SGH.size(0));
    TORCH_CHECK_VALUE(all.empty() || (all.back().key_start <= d.key_start && all.back().key_end <= d.key_end), "document ", i,
                      " starts or ends before the keys of the one before it");
    all.push_back(d);
  }
  return all;
}

// Some documents, which share no key with those of other tasks, and one head of keys: no two tasks add to the same gradient.
struct Task {
  int64_t first, end, group;
};

template <typename Work>
void each_task(const std::vector<Document>& all, int64_t groups, const Work& work) {
  std::vector<Task> tasks;
  std::vector<int64_t> costs;
  const int64_t n = all.size();
  for (int64_t i = 0, j = 0; i < n; i = j) {
    int64_t end = 0, cost = 0;
    for (j = i; j < n && (j == i || all[j].key_start < end); ++j) {
      end = std::max(end, all[j].key_end);
      cost += (all[j].end - all[j].start) * (all[j].key_end - all[j].key_start);
    }
    for (int64_t g = 0; g < groups && cost; ++g) {
      tasks.push_back({i, j, g});
      costs.push_back(cost);
    }
  }
  side_by_side(costs, [&](size_t i) { work(tasks[i]); });
}

// Query rows first : first + count of a document with the heads of one group, which see `keys` keys from `before` on.
struct Block {
  int64_t first, count, before, keys, heads, group;

  int64_t rows() const { return heads * count; }
  int64_t row(int64_t m) const { return first + m % count; }
  int64_t head(int64_t m) const { return group * heads + m / count; }
};

template <typename T, typename Work>
void each_block(const std::vector<Document>& all, Sight sight, const Task& task, int64_t heads, const Work& work) {
  for (int64_t u = task.first; u < task.end; ++u) {
    const Document& d = all[u];
    for (int64_t first = sight.first_row(d); first < d.end; first += kRows<T>) {
      const int64_t count = std::min(kRows<T>, d.end - first), before = sight.first(d, first);
      work(d, Block{first, count, before, sight.end(d, first + count - 1) - before, heads, task.group});
    }
  }
}

// x [T, N, H] of a block, [heads * count, H].
template <typename T>
void gather(const Tensor& x_TNH, const Block& b, const Tensor& rows_MH) {
  for (int64_t m = 0; m < b.rows(); ++m)
    std::copy_n(row<T>(x_TNH, b.row(m)) + b.head(m) * x_TNH.stride(1), x_TNH.size(2), mutable_row<T>(rows_MH, m));
}

template <typename T>
void scatter(const Tensor& rows_MH, const Block& b, const Tensor& x_TNH) {
  for (int64_t m = 0; m < b.rows(); ++m)
    std::copy_n(row<T>(rows_MH, m), x_TNH.size(2), mutable_row<T>(x_TNH, b.row(m)) + b.head(m) * x_TNH.stride(1));
}

template <typename T>
void hide(T* row, int64_t first, int64_t end, int64_t keys) {
  std::fill_n(row, first, T(0));
  std::fill_n(row + end, keys - end, T(0));
}

template <typename T>
void forward(const Tensor& q_TNH, const Tensor& k_GSH, const Tensor& v_GSH, const std::vector<Document>& all, Sight sight, double scale,
             const Tensor& out_TNH, const Tensor& lse_NT) {
  const int64_t groups = k_GSH.size(0), heads = q_TNH.size(1) / groups, width = q_TNH.size(2);
  each_task(all, groups, [&](const Task& task) {
    Space q_space(q_TNH), out_space(q_TNH), scores_space(q_TNH);
    WideRow<T> wide;
    each_block<T>(all, sight, task, heads, [&](const Document& d, const Block& b) {
      Tensor q_MH = q_space.get(b.rows(), width), out_MH = out_space.get(b.rows(), width), scores_MK = scores_space.get(b.rows(), b.keys);
      gather<T>(q_TNH, b, q_MH);
      at::mm_out(scores_MK, q_MH, k_GSH[task.group].narrow(0, b.before, b.keys).t());
      for (int64_t m = 0; m < b.rows(); ++m) {
        const int64_t first = sight.first(d, b.row(m)) - b.before, end = sight.end(d, b.row(m)) - b.before;
        T* scores = mutable_row<T>(scores_MK, m);
        mutable_row<Wide<T>>(lse_NT, b.head(m))[b.row(m)] = softmax<Wide<T>>(wide.read(scores + first, end - first), end - first, scale);
        wide.write(scores + first, end - first);
        hide(scores, first, end, b.keys);
      }
      at::mm_out(out_MH, scores_MK, v_GSH[task.group].narrow(0, b.before, b.keys));
      scatter<T>(out_MH, b, out_TNH);
    });
  });
}

// Per head and row: the logarithm of the softmax's denominator, maybe over more keys than these; then the sum of result times its gradient;
// and the logarithm's gradient, if there is one.
struct Totals {
  Tensor lse_NT, delta_NT, dlse_NT;
};

// From scores and the gradients of weights the weights and the gradients of scores, of the n keys that a row sees, in place.
template <typename A>
void row_backward(A* weights, A* grads, int64_t n, A scale, const Totals& totals, int64_t head, int64_t row) {
  using V = Vectorized<A>;
  auto total = [&](const Tensor& t_NT) { return reedling::row<A>(t_NT, head)[row]; };
  exponentials(weights, n, scale, total(totals.lse_NT));
  A shift = totals.delta_NT.defined() ? total(totals.delta_NT) : dot(weights, grads, n);
  if (totals.dlse_NT.defined()) shift -= total(totals.dlse_NT);
  at::vec::map2<A>([=](V w, V g) { return w * (g - V(shift)) * V(scale); }, grads, weights, grads, n);
}

template <typename T>
void backward(const Tensor& dout_TNH, const Tensor& q_TNH, const Tensor& k_GSH, const Tensor& v_GSH, const std::vector<Document>& all,
              Sight sight, double scale, const Totals& totals, const Tensor& dq_TNH, const Tensor& dk_GSH, const Tensor& dv_GSH) {
  const int64_t groups = k_GSH.size(0), heads = q_TNH.size(1) / groups, width = q_TNH.size(2);
  each_task(all, groups, [&](const Task& task) {
    Space q_space(q_TNH), dout_space(q_TNH), dq_space(q_TNH), scores_space(q_TNH), dscores_space(q_TNH);
    WideRow<T> weights, grads;
    each_block<T>(all, sight, task, heads, [&](const Document& d, const Block& b) {
      Tensor q_MH = q_space.get(b.rows(), width), dout_MH = dout_space.get(b.rows(), width), dq_MH = dq_space.get(b.rows(), width);
      Tensor scores_MK = scores_space.get(b.rows(), b.keys), dscores_MK = dscores_space.get(b.rows(), b.keys);
      auto keys = [&](const Tensor& x_GSH) { return x_GSH[task.group].narrow(0, b.before, b.keys); };
      gather<T>(q_TNH, b, q_MH);
      gather<T>(dout_TNH, b, dout_MH);
      at::mm_out(scores_MK, q_MH, keys(k_GSH).t());
      at::mm_out(dscores_MK, dout_MH, keys(v_GSH).t());
      for (int64_t m = 0; m < b.rows(); ++m) {
        const int64_t first = sight.first(d, b.row(m)) - b.before, end = sight.end(d, b.row(m)) - b.before, n = end - first;
        T *scores = mutable_row<T>(scores_MK, m), *dscores = mutable_row<T>(dscores_MK, m);
        row_backward<Wide<T>>(weights.read(scores + first, n), grads.read(dscores + first, n), n, scale, totals, b.head(m), b.row(m));
        weights.write(scores + first, n);
        grads.write(dscores + first, n);
        hide(scores, first, end, b.keys);
        hide(dscores, first, end, b.keys);
      }
      at::mm_out(dq_MH, dscores_MK, keys(k_GSH));
      scatter<T>(dq_MH, b, dq_TNH);
      product(keys(dk_GSH), dscores_MK.t(), q_MH, false, true);
      product(keys(dv_GSH), scores_MK.t(), dout_MH, false, true);
    });
  });
}

Tensor whole_heads(const Tensor& x_TNH) { return x_TNH.stride(2) == 1 ? x_TNH : x_TNH.contiguous(); }
Tensor by_group(const Tensor& x_SGH) { return x_SGH.transpose(0, 1).contiguous(); }

std::tuple<Tensor, Tensor> attention(const Tensor& q_TNH, const Tensor& k_SGH, const Tensor& v_SGH, const Tensor& bounds_U1,
                                     const std::optional<Tensor>& keys_2U, bool causal, double scale, std::optional<int64_t> window) {
  const Tensor out_TNH = at::zeros(q_TNH.sizes(), q_TNH.options());
  const Tensor lse_NT = at::full({q_TNH.size(1), q_TNH.size(0)}, -std::numeric_limits<double>::infinity(),
                                 q_TNH.options().dtype(wide_type(q_TNH)));
  REEDLING_FLOATING_TYPES(q_TNH.scalar_type(), "attention", [&] {
    forward<scalar_t>(whole_heads(q_TNH), by_group(k_SGH), by_group(v_SGH), documents(q_TNH, k_SGH, v_SGH, bounds_U1, keys_2U),
                      {causal, window}, scale, out_TNH, lse_NT);
  });
  return {out_TNH, lse_NT};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& dout_TNH, const std::optional<Tensor>& dlse_NT, const Tensor& q_TNH,
                                                      const Tensor& k_SGH, const Tensor& v_SGH, const Tensor& bounds_U1,
                                                      const std::optional<Tensor>& keys_2U, bool causal, double scale,
                                                      std::optional<int64_t> window, const Tensor& lse_NT,
                                                      const std::optional<Tensor>& delta_NT) {
  TORCH_CHECK_VALUE(dout_TNH.sizes() == q_TNH.sizes() && lse_NT.size(0) == q_TNH.size(1) && lse_NT.size(1) == q_TNH.size(0), "q ",
                    q_TNH.sizes(), " gave no result ", dout_TNH.sizes(), " with logarithms ", lse_NT.sizes());
  const Tensor k_GSH = by_group(k_SGH), v_GSH = by_group(v_SGH), dq_TNH = at::zeros(q_TNH.sizes(), q_TNH.options());
  const Tensor dk_GSH = at::zeros(k_GSH.sizes(), k_GSH.options().dtype(wide_type(k_GSH))), dv_GSH = at::zeros_like(dk_GSH);
  auto total = [](const std::optional<Tensor>& x_NT) { return x_NT ? x_NT->contiguous() : Tensor(); };
  REEDLING_FLOATING_TYPES(q_TNH.scalar_type(), "attention_backward", [&] {
    backward<scalar_t>(whole_heads(dout_TNH), whole_heads(q_TNH), k_GSH, v_GSH, documents(q_TNH, k_SGH, v_SGH, bounds_U1, keys_2U),
                       {causal, window}, scale, {lse_NT.contiguous(), total(delta_NT), total(dlse_NT)}, dq_TNH, dk_GSH, dv_GSH);
  });
  auto by_row = [&](const Tensor& x_GSH) { return x_GSH.transpose(0, 1).to(k_SGH.scalar_type()).contiguous(); };
  return {dq_TNH, by_row(dk_GSH), by_row(dv_GSH)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reedling_cpu, library) {
  library.def("attention(Tensor q, Tensor k, Tensor v, Tensor bounds, Tensor? keys, bool causal, float scale, int? window) -> "
              "(Tensor, Tensor)");
  library.def("attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor bounds, Tensor? keys, bool causal, "
              "float scale, int? window, Tensor lse, Tensor? delta) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(reedling_cpu, CPU, library) {
  library.impl("attention", attention);
  library.impl("attention_backward", attention_backward);
}

}  // namespace reedling

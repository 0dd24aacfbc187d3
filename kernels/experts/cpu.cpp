// Experts on a CPU: the rows of one expert at a time, the experts on the threads side by side.

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "native.h"

namespace reedling {
namespace {

// Which rows serve which choice (token * K + k): those of one expert after the other, each expert's in the order of the choices and padded
// to a multiple, since oneDNN builds a kernel for each new shape and keeps only the last 1,024.
struct Route {
  std::vector<int64_t> counts, starts;  // of each expert; `starts` has one more, the number of rows
  std::vector<int64_t> choices;         // of each row; not set for padding
  std::vector<int64_t> slots;           // the row of each choice, -1 where it has no expert here
};

Route route(const Tensor& ids_TK, int64_t experts, int64_t multiple) {
  const Tensor ids = ids_TK.to(at::kLong).contiguous();
  const int64_t n = ids.numel(), *id = ids.const_data_ptr<int64_t>();
  auto here = [&](int64_t i) { return id[i] >= 0 && id[i] < experts; };
  Route r{std::vector<int64_t>(experts), std::vector<int64_t>(experts + 1), {}, std::vector<int64_t>(n, -1)};
  for (int64_t i = 0; i < n; ++i)
    if (here(i)) ++r.counts[id[i]];
  for (int64_t e = 0; e < experts; ++e) r.starts[e + 1] = r.starts[e] + (r.counts[e] + multiple - 1) / multiple * multiple;
  r.choices.resize(r.starts[experts]);
  std::vector<int64_t> next = r.starts;
  for (int64_t i = 0; i < n; ++i)
    if (here(i)) r.choices[r.slots[i] = next[id[i]]++] = i;
  return r;
}

// The rows of one expert: `count`, padded to `size`, from `start` on.
struct Rows {
  int64_t expert, start, count, size;
  Tensor of(const Tensor& x_R) const { return x_R.narrow(0, start, size); }
};

template <typename Work>
void each_expert(const Route& r, const Work& work) {
  side_by_side(r.counts, [&](size_t e) { work(Rows{int64_t(e), r.starts[e], r.counts[e], r.starts[e + 1] - r.starts[e]}); });
}

// The tokens' rows of x; zeros where there is padding.
template <typename T>
Tensor take(const Tensor& x_TD, const Route& r, const Rows& rows, int64_t top_k, Space& space) {
  const int64_t width = x_TD.size(1);
  const Tensor out = space.get(rows.size, width);
  for (int64_t i = 0; i < rows.count; ++i)
    std::copy_n(row<T>(x_TD, r.choices[rows.start + i] / top_k), width, mutable_row<T>(out, i));
  std::fill_n(mutable_row<T>(out, rows.count), (rows.size - rows.count) * width, T(0));
  return out;
}

// Sum of each token's rows, added up in fp32 or wider.
template <typename T>
void combine(const Tensor& rows_RD, const Route& r, const Tensor& out_TD) {
  const int64_t top_k = r.slots.size() / std::max<int64_t>(out_TD.size(0), 1), width = out_TD.size(1);
  at::parallel_for(0, out_TD.size(0), 64, [&](int64_t begin, int64_t end) {
    std::vector<Wide<T>> total(width);
    for (int64_t t = begin; t < end; ++t) {
      std::fill(total.begin(), total.end(), Wide<T>(0));
      for (int64_t k = 0; k < top_k; ++k)
        if (const int64_t slot = r.slots[t * top_k + k]; slot >= 0) {
          const T* add = row<T>(rows_RD, slot);
          for (int64_t i = 0; i < width; ++i) total[i] += Wide<T>(add[i]);
        }
      at::vec::convert(total.data(), mutable_row<T>(out_TD, t), width);
    }
  });
}

// An activation of a row of pre-activations h, which are n, or gates and n others (kernels/activation.py says which).
struct Relu2 {
  template <typename A>
  static void forward(const A* h, A* act, int64_t n) {
    using V = Vectorized<A>;
    at::vec::map<A>([](V v) { const V u = at::vec::maximum(v, V(0)); return u * u; }, act, h, n);
  }
  template <typename A>
  static void backward(const A* h, const A* grad, A* dh, int64_t n) {
    using V = Vectorized<A>;
    at::vec::map2<A>([](V v, V g) { return at::vec::maximum(v, V(0)) * g * V(2); }, dh, h, grad, n);
  }
  static constexpr int64_t kExpansion = 1;
};

struct Swiglu {
  template <typename A>
  static void forward(const A* h, A* act, int64_t n) {
    using V = Vectorized<A>;
    at::vec::map2<A>([](V gate, V up) { return gate / (V(1) + gate.neg().exp()) * up; }, act, h, h + n, n);
  }
  template <typename A>
  static void backward(const A* h, const A* grad, A* dh, int64_t n) {
    using V = Vectorized<A>;
    at::vec::map3<A>(
        [](V gate, V up, V g) {
          const V sigmoid = V(1) / (V(1) + gate.neg().exp());
          return g * up * sigmoid * (V(1) + gate * (V(1) - sigmoid));
        },
        dh, h, h + n, grad, n);
    at::vec::map2<A>([](V gate, V g) { return g * gate / (V(1) + gate.neg().exp()); }, dh + n, h, grad, n);
  }
  static constexpr int64_t kExpansion = 2;
};

// Which library multiplies, for x wᵀ, dy w and dyᵀ x.
struct Libraries {
  bool nt, nn, tn;
};

template <typename T, typename Activation>
void forward(const Tensor& x_TD, const Route& r, const Tensor& weights_TK, const Tensor& up_EFD, const Tensor& down_EDF, Libraries onednn,
             const Tensor& h_RF, const Tensor& y_RD) {
  using A = Wide<T>;
  const int64_t n = down_EDF.size(2), width = h_RF.size(1), top_k = weights_TK.size(1);
  const A* share = weights_TK.const_data_ptr<A>();
  each_expert(r, [&](const Rows& rows) {
    if (!rows.count) return;
    Space x_space(x_TD), act_space(x_TD);
    const Tensor h = rows.of(h_RF), act_RF = act_space.get(rows.size, n);
    product(h, take<T>(x_TD, r, rows, top_k, x_space), up_EFD[rows.expert].t(), onednn.nt);
    std::vector<A> wide(width), act(n);
    for (int64_t i = 0; i < rows.size; ++i) {
      at::vec::convert(row<T>(h, i), wide.data(), width);
      Activation::forward(wide.data(), act.data(), n);
      if (i < rows.count) multiply(act.data(), n, share[r.choices[rows.start + i]]);
      at::vec::convert(act.data(), mutable_row<T>(act_RF, i), n);
    }
    product(rows.of(y_RD), act_RF, down_EDF[rows.expert].t(), onednn.nt);
  });
}

struct Gradients {
  Tensor x_RD, weights_TK, up_EFD, down_EDF;  // the last two undefined unless needed
};

template <typename T, typename Activation>
void backward(const Tensor& dy_TD, const Tensor& x_TD, const Route& r, const Tensor& weights_TK, const Tensor& up_EFD,
              const Tensor& down_EDF, Libraries onednn, const Tensor& h_RF, const Gradients& grads) {
  using A = Wide<T>;
  const int64_t n = down_EDF.size(2), width = up_EFD.size(1), top_k = weights_TK.size(1);
  const A* share = weights_TK.const_data_ptr<A>();
  A* dshare = grads.weights_TK.mutable_data_ptr<A>();
  each_expert(r, [&](const Rows& rows) {
    if (!rows.count) {
      for (const Tensor& grad : {grads.up_EFD, grads.down_EDF})
        if (grad.defined()) grad[rows.expert].zero_();
      return;
    }
    Space x_space(x_TD), dy_space(x_TD), h_space(x_TD), act_space(x_TD), dact_space(x_TD), dh_space(x_TD);
    const Tensor x = take<T>(x_TD, r, rows, top_k, x_space), dy = take<T>(dy_TD, r, rows, top_k, dy_space);
    const Tensor h = h_RF.size(0) ? rows.of(h_RF) : h_space.get(rows.size, width), act_RF = act_space.get(rows.size, n);
    const Tensor dact_RF = dact_space.get(rows.size, n), dh_RF = dh_space.get(rows.size, width);
    if (!h_RF.size(0)) product(h, x, up_EFD[rows.expert].t(), onednn.nt);
    product(dact_RF, dy, down_EDF[rows.expert], onednn.nn);  // before the router's weight
    std::vector<A> wide(width), act(n), grad(n), dh(width);
    for (int64_t i = 0; i < rows.size; ++i) {
      const bool real = i < rows.count;
      const int64_t choice = real ? r.choices[rows.start + i] : 0;
      const A weight = real ? share[choice] : A(0);
      at::vec::convert(row<T>(h, i), wide.data(), width);
      at::vec::convert(row<T>(dact_RF, i), grad.data(), n);
      Activation::forward(wide.data(), act.data(), n);
      if (real) dshare[choice] = dot(act.data(), grad.data(), n);
      multiply(act.data(), n, weight);
      multiply(grad.data(), n, weight);
      Activation::backward(wide.data(), grad.data(), dh.data(), n);
      at::vec::convert(act.data(), mutable_row<T>(act_RF, i), n);
      at::vec::convert(dh.data(), mutable_row<T>(dh_RF, i), width);
    }
    if (grads.down_EDF.defined()) product(grads.down_EDF[rows.expert], dy.t(), act_RF, onednn.tn);
    if (grads.up_EFD.defined()) product(grads.up_EFD[rows.expert], dh_RF.t(), x, onednn.tn);
    product(rows.of(grads.x_RD), dh_RF, up_EFD[rows.expert], onednn.nn);
  });
}

template <typename Work>
void with_activation(std::string_view name, const Work& work) {
  name == "relu2" ? work(Relu2{}) : work(Swiglu{});
}

// What would otherwise be read beyond its end.
void check(const Tensor& x_TD, const Tensor& ids_TK, const Tensor& weights_TK, const Tensor& up_EFD, const Tensor& down_EDF,
           std::string_view activation) {
  with_activation(activation, [&](auto kind) {
    TORCH_CHECK_VALUE(up_EFD.size(1) == decltype(kind)::kExpansion * down_EDF.size(2), activation, " of up ", up_EFD.sizes(),
                      " does not give what down ", down_EDF.sizes(), " takes");
  });
  TORCH_CHECK_VALUE(up_EFD.size(0) == down_EDF.size(0) && up_EFD.size(2) == x_TD.size(1) && down_EDF.size(1) == x_TD.size(1), "x ",
                    x_TD.sizes(), ", up ", up_EFD.sizes(), " and down ", down_EDF.sizes(), " do not fit one another");
  TORCH_CHECK_VALUE(ids_TK.sizes() == weights_TK.sizes() && ids_TK.size(0) == x_TD.size(0), "x ", x_TD.sizes(), " has choices ",
                    ids_TK.sizes(), " with weights ", weights_TK.sizes());
}

std::tuple<Tensor, Tensor> experts(const Tensor& x_TD, const Tensor& ids_TK, const Tensor& weights_TK, const Tensor& up_EFD,
                                   const Tensor& down_EDF, std::string_view activation, int64_t multiple, int64_t hidden_rows,
                                   std::array<bool, 3> onednn) {
  check(x_TD, ids_TK, weights_TK, up_EFD, down_EDF, activation);
  const Route r = route(ids_TK, up_EFD.size(0), multiple);
  const int64_t rows = r.starts.back();
  const Tensor h_RF = at::empty({std::max(rows, hidden_rows), up_EFD.size(1)}, x_TD.options());
  const Tensor y_RD = at::empty({rows, x_TD.size(1)}, x_TD.options()), out_TD = at::empty_like(x_TD);
  const Tensor shares = weights_TK.to(wide_type(x_TD)).contiguous();
  REEDLING_FLOATING_TYPES(x_TD.scalar_type(), "experts", [&] {
    with_activation(activation, [&](auto kind) {
      forward<scalar_t, decltype(kind)>(x_TD, r, shares, up_EFD, down_EDF, {onednn[0], onednn[1], onednn[2]}, h_RF, y_RD);
    });
    combine<scalar_t>(y_RD, r, out_TD);
  });
  return {out_TD, hidden_rows ? h_RF : at::empty({0, up_EFD.size(1)}, x_TD.options())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> experts_backward(const Tensor& dy_TD, const Tensor& h_RF, const Tensor& x_TD, const Tensor& ids_TK,
                                                            const Tensor& weights_TK, const Tensor& up_EFD, const Tensor& down_EDF,
                                                            std::string_view activation, int64_t multiple, bool needs_up, bool needs_down,
                                                            std::array<bool, 3> onednn) {
  check(x_TD, ids_TK, weights_TK, up_EFD, down_EDF, activation);
  const Route r = route(ids_TK, up_EFD.size(0), multiple);
  const Tensor shares = weights_TK.to(wide_type(x_TD)).contiguous(), dx_TD = at::empty_like(x_TD);
  const Gradients grads{at::empty({r.starts.back(), x_TD.size(1)}, x_TD.options()), at::zeros(shares.sizes(), shares.options()),
                        needs_up ? at::empty_like(up_EFD) : Tensor(), needs_down ? at::empty_like(down_EDF) : Tensor()};
  REEDLING_FLOATING_TYPES(x_TD.scalar_type(), "experts_backward", [&] {
    with_activation(activation, [&](auto kind) {
      backward<scalar_t, decltype(kind)>(dy_TD, x_TD, r, shares, up_EFD, down_EDF, {onednn[0], onednn[1], onednn[2]}, h_RF, grads);
    });
    combine<scalar_t>(grads.x_RD, r, dx_TD);
  });
  auto given = [](const Tensor& grad, const Tensor& like) { return grad.defined() ? grad : at::empty({like.size(0), 0}, like.options()); };
  return {dx_TD, grads.weights_TK.to(weights_TK.scalar_type()), given(grads.up_EFD, up_EFD), given(grads.down_EDF, down_EDF)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reedling_cpu, library) {
  library.def("experts(Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down, str activation, int multiple, int hidden_rows, "
              "bool[3] onednn) -> (Tensor, Tensor)");
  library.def("experts_backward(Tensor dy, Tensor h, Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down, str activation, "
              "int multiple, bool needs_up, bool needs_down, bool[3] onednn) -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(reedling_cpu, CPU, library) {
  library.impl("experts", experts);
  library.impl("experts_backward", experts_backward);
}

}  // namespace reedling

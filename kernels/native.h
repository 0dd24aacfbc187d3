// What the CPU operators in C++ share: work divided among threads, memory that a thread uses again, products, rows in fp32 or wider.

#pragma once

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <optional>
#include <type_traits>
#include <vector>

#define REEDLING_FLOATING_TYPES(type, name, ...) AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, type, name, __VA_ARGS__)

namespace reedling {

using at::Tensor;
using at::vec::Vectorized;

// fp32 for 16-bit numbers; fp32 and fp64 stay.
template <typename T>
using Wide = at::opmath_type<T>;

inline at::ScalarType wide_type(const Tensor& x) { return at::toOpMathType(x.scalar_type()); }

// Calls work(i) for each cost, as many at once as there are threads, each on one thread, the dearest first.
// One after the other, each with all threads, if one is so dear that the others would wait for it.
template <typename Work>
void side_by_side(const std::vector<int64_t>& costs, const Work& work) {
  const int64_t threads = at::get_num_threads(), total = std::accumulate(costs.begin(), costs.end(), int64_t{0});
  const int64_t dearest = costs.empty() ? 0 : *std::max_element(costs.begin(), costs.end());
  if (threads == 1 || at::in_parallel_region() || dearest * threads > total) {
    for (size_t i = 0; i < costs.size(); ++i) work(i);
    return;
  }
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return costs[a] > costs[b]; });
  std::atomic<size_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    at::AutoDispatchBelowADInplaceOrView no_gradient;  // a setting of the thread that calls
    for (size_t i = next++; i < order.size(); i = next++) work(order[i]);
  });
}

// Memory for one matrix after another.
class Space {
 public:
  explicit Space(const Tensor& like) : options(like.options()) {}
  Tensor get(int64_t rows, int64_t columns) {
    if (!memory.defined() || memory.numel() < rows * columns) memory = at::empty({rows * columns}, options);
    return memory.narrow(0, 0, rows * columns).view({rows, columns});
  }

 private:
  at::TensorOptions options;
  Tensor memory;
};

// out = a b by oneDNN if so chosen, which kernels/linear.py does for fp32, else by what PyTorch takes; `add`: to what is there, of any type.
inline void product(Tensor out, const Tensor& a, const Tensor& b, bool onednn, bool add = false) {
  if (onednn) {
    using Linear = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, std::string_view,
                          c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>);
    static const auto linear = c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<Linear>();
    const Tensor y = linear.call(a, b.t(), std::nullopt, "none", c10::List<std::optional<at::Scalar>>(), "");
    add ? out.add_(y) : out.copy_(y);
  } else if (!add) {
    at::mm_out(out, a, b);
  } else if (out.scalar_type() == a.scalar_type()) {
    at::addmm_out(out, out, a, b);
  } else {
    out.add_(at::mm(a, b));
  }
}

template <typename T>
const T* row(const Tensor& x, int64_t i) {
  return x.const_data_ptr<T>() + i * x.stride(0);
}

template <typename T>
T* mutable_row(const Tensor& x, int64_t i) {
  return x.mutable_data_ptr<T>() + i * x.stride(0);
}

// Numbers of a row in fp32 or wider: a copy of 16-bit ones, the others where they lie.
template <typename T>
class WideRow {
 public:
  Wide<T>* read(T* x, int64_t n) {
    if constexpr (std::is_same_v<T, Wide<T>>) return x;
    copy.resize(n);
    at::vec::convert(x, copy.data(), n);
    return copy.data();
  }
  void write(T* x, int64_t n) const {
    if constexpr (!std::is_same_v<T, Wide<T>>) at::vec::convert(copy.data(), x, n);
  }

 private:
  std::vector<Wide<T>> copy;
};

template <typename A>
A sum(const A* x, int64_t n) {
  return at::vec::reduce_all<A>([](Vectorized<A> a, Vectorized<A> b) { return a + b; }, x, n);
}

// The largest of n scaled numbers.
template <typename A>
A largest(const A* x, int64_t n, A scale) {
  using V = Vectorized<A>;
  return at::vec::map_reduce_all<A>([=](V v) { return v * V(scale); }, [](V a, V b) { return at::vec::maximum(a, b); }, x, n);
}

template <typename A>
A dot(const A* x, const A* y, int64_t n) {
  using V = Vectorized<A>;
  return at::vec::map2_reduce_all<A>([](V a, V b) { return a * b; }, [](V a, V b) { return a + b; }, x, y, n);
}

// exp(scale x - shift) in place.
template <typename A>
void exponentials(A* x, int64_t n, A scale, A shift) {
  using V = Vectorized<A>;
  at::vec::map<A>([=](V v) { return (v * V(scale) - V(shift)).exp_u20(); }, x, x, n);
}

template <typename A>
void multiply(A* x, int64_t n, A factor) {
  using V = Vectorized<A>;
  at::vec::map<A>([=](V v) { return v * V(factor); }, x, x, n);
}

// The softmax of n scaled numbers, in place; the natural logarithm of its denominator.
template <typename A>
A softmax(A* x, int64_t n, A scale) {
  const A most = largest(x, n, scale);
  exponentials(x, n, scale, most);
  const A total = sum(x, n);
  multiply(x, n, 1 / total);
  return most + std::log(total);
}

}  // namespace reedling

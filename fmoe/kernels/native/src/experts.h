// The experts' feed-forward blocks, one expert at a time, forward and backward.
//
// Shape letters: T tokens, K choices, M rows (kept assignments, sorted by expert), L experts, D width, H hidden width,
// P height of the first map (2 H if gated, else H).
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "processor.h"

namespace fmoe {
namespace {

using std::optional;

template <class C>
constexpr at::ScalarType scalar_type = std::is_same_v<C, float> ? at::kFloat : at::kBFloat16;

template <class C>
Tensor matrix(const C* data, int64_t rows, int64_t columns) {
  return at::from_blob(const_cast<C*>(data), {rows, columns}, at::TensorOptions().dtype(scalar_type<C>));
}

template <class C>
void gemm(Tensor out, const Tensor& a, const Tensor& b, bool add = false) {
  if (add)
    at::addmm_out(out, out, a, b);
  else
    at::mm_out(out, a, b);
}

// Whether GEMMs add the bias before they round to 16 bits. A bias that is added to the rounded product is rounded
// twice: if the two nearly cancel, the sum may get another sign, and ReLU another derivative.
template <class C>
constexpr bool ADDS_BIAS = !std::is_same_v<C, float>;

// out = x w^T, plus the bias if ADDS_BIAS: [n, in] by [width, in].
template <class T, class C>
void linear(C* out, const C* x, const C* w, [[maybe_unused]] const T* bias, int64_t n, int64_t in, int64_t width) {
  Tensor result = matrix(out, n, width);
  const Tensor rows = matrix(x, n, in), weight = matrix(w, width, in).t();
  if constexpr (ADDS_BIAS<C>) {
    if (bias) {
      at::addmm_out(result, matrix(bias, 1, width), rows, weight);
      return;
    }
  }
  at::mm_out(result, rows, weight);
}

template <class B, class O>
void small_gemm(int64_t m, int64_t n, int64_t k, Strided<float> a, Strided<B> b, O* out, bool add = false) {
  Gemm<B, O> call;
  if constexpr (std::is_same_v<B, float> && std::is_same_v<O, float>) call = gemms().ff;
  if constexpr (std::is_same_v<B, bf16> && std::is_same_v<O, float>) call = gemms().bf;
  if constexpr (std::is_same_v<B, float> && std::is_same_v<O, bf16>) call = gemms().fb;
  if constexpr (std::is_same_v<B, bf16> && std::is_same_v<O, bf16>) call = gemms().bb;
  call(m, n, k, a, b, out, n, add, scratch<float>(WORK, gemms().work(m, n, k)));
}

// Up to this number of rows per expert, the GEMMs of gemm.cpp are used: a library's repacking of weights costs the same
// for few rows as for many.
std::atomic<int64_t> few_rows{&gemms() == &isa_default::gemms ? 0 : 192};

// Whether only this thread computes the expert.
bool is_alone() { return at::in_parallel_region() || at::get_num_threads() == 1; }

struct Sizes {
  int64_t experts, d, h, p;
  Activation act;
  bool gated;
};

// Upper bound on the rows of an expert that are processed at once, which bounds the memory between the GEMMs.
constexpr int64_t CHUNK = 1024;

// Rows per part if `rows` are split into nearly equal parts of at most `most` rows: a short last part would be slow.
int64_t part_of(int64_t rows, int64_t most) {
  const int64_t parts = (rows + most - 1) / most;
  return (rows + parts - 1) / parts;
}

template <class T, class C>
struct Weights {
  const T *in, *bias_in, *out, *bias_out;
};

template <class C>
struct Rows {  // rows of one expert, in the type of the GEMMs
  template <class T>
  static const C* get(const T* x, const int64_t* index, int64_t per, int64_t begin, int64_t n, int64_t d, Slot slot) {
    if constexpr (std::is_same_v<T, C>)
      if (!index) return x + begin * d;
    C* rows = scratch<C>(slot, n * d);
    const T* from = index ? x : x + begin * d;
    const int64_t* mine = index ? index + begin : nullptr;
    at::parallel_for(0, n, 64, [&](int64_t a, int64_t b) {
      kernels<T, C>().gather(mine ? from : from + a * d, mine ? mine + a : nullptr, per, b - a, d, rows + a * d);
    });
    return rows;
  }
};

template <class T, class C>
const C* as_gemm_type(const T* weight, int64_t size, Slot slot) {
  if constexpr (std::is_same_v<T, C>) {
    return weight;
  } else {
    C* wide = scratch<C>(slot, size);
    at::parallel_for(0, size, 1 << 16,
                     [&](int64_t a, int64_t b) { kernels<T, C>().widen(weight + a, b - a, wide + a); });
    return wide;
  }
}

// Calls f(expert) for every expert with rows: first for the largest ones, each by all threads together, until the rest
// can be spread over the threads evenly or is too small to share; then each thread takes one expert at a time.
template <class F>
void each_expert(const int64_t* count, int64_t experts, F f) {
  std::vector<int64_t> order;
  for (int64_t e = 0; e < experts; e++)
    if (count[e]) order.push_back(e);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return count[a] > count[b]; });
  const size_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  size_t together = threads == 1 ? order.size() : 0;
  for (; together < order.size(); together++) {
    std::vector<int64_t> load(threads, 0);
    for (size_t i = together; i < order.size(); i++) *std::min_element(load.begin(), load.end()) += count[order[i]];
    const int64_t sum = std::accumulate(load.begin(), load.end(), int64_t(0)), all = threads;
    const bool is_even = *std::max_element(load.begin(), load.end()) * all * 20 <= sum * 21;
    if (is_even || count[order[together]] * 3 * all <= sum) break;
  }
  for (size_t i = 0; i < together; i++) f(order[i]);
  if (together == order.size()) return;
  std::atomic<size_t> next{together};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    at::AutoDispatchBelowADInplaceOrView guard;  // autograd is off in this thread too
    for (size_t i; (i = next++) < order.size();) f(order[i]);
  });
}

std::vector<int64_t> begins(const int64_t* count, int64_t experts) {
  std::vector<int64_t> begin(experts + 1, 0);
  for (int64_t e = 0; e < experts; e++) begin[e + 1] = begin[e] + count[e];
  return begin;
}

const void* data(const Tensor& t) { return t.const_data_ptr(); }
const void* data(const optional<Tensor>& t) { return t && t->defined() ? t->const_data_ptr() : nullptr; }

template <class T, class C>
void forward(const Sizes& s, const T* x, const int64_t* index, int64_t per, const int64_t* count, Weights<T, C> w,
             T* hidden, T* out) {
  constexpr bool SAME = std::is_same_v<T, C>;
  const auto begin = begins(count, s.experts);
  const auto& k = kernels<T, C>();
  each_expert(count, s.experts, [&](int64_t e) {
    const T *in = w.in + e * s.p * s.d, *down = w.out + e * s.d * s.h;
    const bool is_small = std::is_same_v<C, float> && count[e] <= few_rows && is_alone();
    const C* w_in = is_small ? nullptr : as_gemm_type<T, C>(in, s.p * s.d, W_IN);
    const C* w_out = is_small ? nullptr : as_gemm_type<T, C>(down, s.d * s.h, W_OUT);
    const T* b_in = w.bias_in ? w.bias_in + e * s.p : nullptr;
    const T* b_out = w.bias_out ? w.bias_out + e * s.d : nullptr;
    const int64_t part = part_of(count[e], CHUNK);
    for (int64_t r = begin[e]; r < begin[e + 1]; r += part) {
      const int64_t n = std::min(part, begin[e + 1] - r);
      const C* rows = Rows<C>::get(x, index, per, r, n, s.d, ROWS);
      T* kept = hidden + r * s.p;
      T* result = out + r * s.d;
      C *u, *y, *active = scratch<C>(ACTIVE, n * s.h);
      if constexpr (SAME) {
        u = kept, y = result;
      } else {
        u = scratch<C>(BEFORE, n * s.p), y = scratch<C>(OUT, n * s.d);
      }
      if constexpr (std::is_same_v<C, float>) {
        if (is_small) {
          small_gemm<T, float>(n, s.p, s.d, {rows, s.d, 1}, {in, 1, s.d}, u);
          k.activate(u, b_in, kept, active, n, s.h, s.act, s.gated);
          small_gemm<T, float>(n, s.d, s.h, {active, s.h, 1}, {down, 1, s.h}, y);
          if (!SAME || b_out) k.finish(y, b_out, result, n, s.d);
          continue;
        }
      }
      linear<T, C>(u, rows, w_in, b_in, n, s.d, s.p);
      const T* b_late = ADDS_BIAS<C> ? nullptr : b_in;
      at::parallel_for(0, n, 16, [&](int64_t a, int64_t b) {
        k.activate(u + a * s.p, b_late, kept + a * s.p, active + a * s.h, b - a, s.h, s.act, s.gated);
      });
      linear<T, C>(y, active, w_out, b_out, n, s.h, s.d);
      if (!ADDS_BIAS<C> && (!SAME || b_out))
        at::parallel_for(0, n, 64,
                         [&](int64_t a, int64_t b) { k.finish(y + a * s.d, b_out, result + a * s.d, b - a, s.d); });
    }
  });
}

// Destination of the gradient of an expert's weights. If it is an accumulator (Megatron's main_grad, float), the
// gradient is added.
struct Gradient {
  void* data = nullptr;  // null: not needed
  bool is_accumulator = false;
};

// gradient (+)= transpose of left [n, rows] times right [n, columns], over one part of an expert's rows.
template <class T, class C>
void weight_gradient(Gradient to, int64_t e, int64_t n, const C* left, int64_t rows, const C* right, int64_t columns,
                     bool is_small, bool first, bool last, Slot slot) {
  const int64_t size = rows * columns;
  float* sum = to.is_accumulator ? static_cast<float*>(to.data) + e * size : nullptr;
  T* fresh = to.is_accumulator ? nullptr : static_cast<T*>(to.data) + e * size;
  if constexpr (std::is_same_v<C, float>) {
    const Strided<float> a{left, 1, rows}, b{right, columns, 1};
    if (is_small && sum) return small_gemm<float, float>(rows, columns, n, a, b, sum, true);
    if (is_small) return small_gemm<float, T>(rows, columns, n, a, b, fresh);
  }
  const Tensor a = matrix(left, n, rows).t(), b = matrix(right, n, columns);
  if constexpr (std::is_same_v<C, float>)
    if (sum) return gemm<C>(matrix(sum, rows, columns), a, b, true);
  if constexpr (std::is_same_v<T, C>)
    if (fresh) return gemm<C>(matrix(fresh, rows, columns), a, b, !first);
  C* part = scratch<C>(slot, size);
  gemm<C>(matrix(part, rows, columns), a, b, !first);
  if (!last) return;
  at::parallel_for(0, size, 1 << 16, [&](int64_t i, int64_t j) {
    if constexpr (std::is_same_v<C, float>) {
      kernels<T, float>().narrow(part + i, j - i, fresh + i);
    } else {  // 16 bits added to an accumulator of 32
      std::vector<float> wide(j - i);
      kernels<bf16, float>().widen(part + i, j - i, wide.data());
      for (int64_t q = i; q < j; q++) sum[q] += wide[q - i];
    }
  });
}

template <class T, class C>
void bias_gradient(T* to, const C* x, const float* scale, int64_t n, int64_t d, float* sums, bool first, bool last) {
  if (first) std::fill(sums, sums + d, 0.f);
  at::parallel_for(0, d, 64, [&](int64_t a, int64_t b) { kernels<T, C>().column_sums(x, scale, n, d, a, b, sums); });
  if (last) kernels<T, float>().narrow(sums, d, to);
}

template <class T, class C>
void backward(const Sizes& s, const T* grad, const T* x, const int64_t* index, int64_t per, const float* weight,
              const int64_t* count, const T* hidden, Weights<T, C> w, T* d_rows, float* d_weight, Gradient d_in,
              T* d_bias_in, Gradient d_out, T* d_bias_out) {
  constexpr bool SAME = std::is_same_v<T, C>;
  // One chunk in bf16: sums would be rounded to 16 bits between chunks.
  constexpr int64_t chunk = std::is_same_v<C, float> ? CHUNK : INT64_MAX / 4;
  const auto begin = begins(count, s.experts);
  const auto& k = kernels<T, C>();
  each_expert(count, s.experts, [&](int64_t e) {
    const T* b_out = w.bias_out ? w.bias_out + e * s.d : nullptr;
    const T *in = w.in + e * s.p * s.d, *down = w.out + e * s.d * s.h;
    const bool is_small = std::is_same_v<C, float> && count[e] <= few_rows && is_alone();
    const C* w_out = is_small ? nullptr : as_gemm_type<T, C>(down, s.d * s.h, W_OUT);
    const C* w_in = d_rows && !is_small ? as_gemm_type<T, C>(in, s.p * s.d, W_IN) : nullptr;
    const int64_t most = part_of(count[e], chunk);
    float* scale = scratch<float>(SCALES, 2 * most + s.d + s.p);
    float* d_scale = scale + most;
    float* sums_out = d_scale + most;
    float* sums_in = sums_out + s.d;
    for (int64_t r = begin[e]; r < begin[e + 1]; r += most) {
      const int64_t n = std::min(most, begin[e + 1] - r);
      const bool first = r == begin[e], last = r + n == begin[e + 1];
      const C* g = Rows<C>::get(grad, index, per, r, n, s.d, GRAD);
      const C* rows = d_in.data ? Rows<C>::get(x, index, per, r, n, s.d, ROWS) : nullptr;
      C *d_active = scratch<C>(D_ACTIVE, n * s.h), *scaled = scratch<C>(ACTIVE, n * s.h);
      C* d_hidden = scratch<C>(D_HIDDEN, n * s.p);
      const float* scales = nullptr;
      if (weight) {
        for (int64_t i = 0; i < n; i++) scale[i] = weight[index ? index[r + i] : r + i];
        scales = scale;
      }
      if constexpr (std::is_same_v<C, float>)
        if (is_small) small_gemm<T, float>(n, s.h, s.d, {g, s.d, 1}, {down, s.h, 1}, d_active);
      if (!is_small) gemm<C>(matrix(d_active, n, s.h), matrix(g, n, s.d), matrix(w_out, s.d, s.h));
      at::parallel_for(0, n, 16, [&](int64_t a, int64_t b) {
        float* dots = d_weight ? d_scale + a : nullptr;
        if (dots && b_out)
          k.dots(g + a * s.d, b_out, b - a, s.d, dots);
        else if (dots)
          std::fill(dots, dots + (b - a), 0.f);
        k.activate_backward(hidden + (r + a) * s.p, d_active + a * s.h, scales ? scales + a : nullptr, scaled + a * s.h,
                            d_hidden + a * s.p, dots, b - a, s.h, s.act, s.gated);
      });
      if (d_weight)
        for (int64_t i = 0; i < n; i++) d_weight[index ? index[r + i] : r + i] = d_scale[i];
      if (d_out.data) weight_gradient<T, C>(d_out, e, n, g, s.d, scaled, s.h, is_small, first, last, OUT);
      if (d_bias_out) bias_gradient(d_bias_out + e * s.d, g, scales, n, s.d, sums_out, first, last);
      if (d_in.data) weight_gradient<T, C>(d_in, e, n, d_hidden, s.p, rows, s.d, is_small, first, last, BEFORE);
      if (d_bias_in) bias_gradient(d_bias_in + e * s.p, d_hidden, nullptr, n, s.p, sums_in, first, last);
      if (!d_rows) continue;
      C* dx = SAME ? reinterpret_cast<C*>(d_rows + r * s.d) : scratch<C>(D_ACTIVE, n * s.d);
      if constexpr (std::is_same_v<C, float>)
        if (is_small) small_gemm<T, float>(n, s.d, s.p, {d_hidden, s.p, 1}, {in, s.d, 1}, dx);
      if (!is_small) gemm<C>(matrix(dx, n, s.d), matrix(d_hidden, n, s.p), matrix(w_in, s.p, s.d));
      if constexpr (!SAME)
        at::parallel_for(0, n, 64, [&](int64_t a, int64_t b) {
          k.finish(dx + a * s.d, nullptr, d_rows + (r + a) * s.d, b - a, s.d);
        });
    }
  });
  auto clear = [&](Gradient to, int64_t size, int64_t e) {
    if (to.data && !to.is_accumulator) std::memset(static_cast<T*>(to.data) + e * size, 0, size * sizeof(T));
  };
  for (int64_t e = 0; e < s.experts; e++) {  // an expert without rows has zero gradients
    if (count[e]) continue;
    clear(d_in, s.p * s.d, e);
    clear(d_out, s.d * s.h, e);
    clear({d_bias_in}, s.p, e);
    clear({d_bias_out}, s.d, e);
  }
}

template <class T>
Tensor gather_sum(const Tensor& rows, const Tensor& place, const float* weight, int64_t num_rows) {
  const int64_t tokens = place.size(0), k = place.size(1), d = rows.size(1);
  Tensor out = Pool::get().take({tokens, d}, rows.options());
  const auto* places = place.const_data_ptr<int64_t>();
  auto* to = static_cast<T*>(out.data_ptr());
  at::parallel_for(0, tokens, 32, [&](int64_t a, int64_t b) {
    kernels<T, T>().gather_sum(static_cast<const T*>(data(rows)), places + a * k, weight ? weight + a * k : nullptr,
                               num_rows, b - a, k, d, to + a * d);
  });
  return out;
}

}  // namespace
}  // namespace fmoe

// Experts' feed-forward blocks over rows grouped by expert, as torch operations: gather, two GEMMs with an activation
// between them, combine.
//
// A thread computes one expert at a time; the largest start first. If an expert is so large that threads would wait for
// it, all threads compute it together. Between the GEMMs, only the pre-activations are kept.
//
// Shape letters: T tokens, K choices, M rows (kept assignments, sorted by expert), L experts, D width, H hidden width,
// P height of the first map (2 H if gated, else H).
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>

#include "experts.h"

namespace fmoe {
namespace {

int64_t check(const Tensor& x, const optional<Tensor>& order, const optional<Tensor>& place,
              const optional<Tensor>& weight, const Tensor& count, const Tensor& w_in, const optional<Tensor>& b_in,
              const Tensor& w_out, const optional<Tensor>& b_out, int64_t activation, bool gated) {
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, "fmoe: x is ", x.scalar_type(),
              ", must be float32 or bfloat16");
  for (const auto* t : {&x, &w_in, &w_out})
    TORCH_CHECK(t->scalar_type() == x.scalar_type() && t->is_contiguous(),
                "fmoe: x, w_in and w_out must be contiguous and of one dtype");
  for (const auto* t : {&b_in, &b_out})
    TORCH_CHECK(!*t || !(*t)->defined() || ((*t)->scalar_type() == x.scalar_type() && (*t)->is_contiguous()),
                "fmoe: b_in and b_out must be contiguous and of the dtype of x");
  TORCH_CHECK(x.dim() == 2 && w_in.dim() == 3 && w_out.dim() == 3,
              "fmoe: x must be [., D], w_in [L, P, D] and w_out [L, D, H]");
  const int64_t experts = w_in.size(0), d = x.size(1), h = w_out.size(2);
  TORCH_CHECK(
      w_in.size(2) == d && w_out.size(1) == d && w_out.size(0) == experts && w_in.size(1) == (gated ? 2 * h : h),
      "fmoe: w_in ", w_in.sizes(), " and w_out ", w_out.sizes(), " do not fit each other and x of width ", d);
  TORCH_CHECK(!b_in || b_in->numel() == experts * w_in.size(1), "fmoe: b_in is ", b_in->sizes(), ", must be [L, P]");
  TORCH_CHECK(!b_out || b_out->numel() == experts * d, "fmoe: b_out is ", b_out->sizes(), ", must be [L, D]");
  TORCH_CHECK(activation >= GELU && activation <= (gated ? SWIGLU_OAI : SILU), "fmoe: activation=", activation,
              " is unknown", gated ? "" : " for experts without gates");
  TORCH_CHECK(count.scalar_type() == at::kLong && count.is_contiguous() && count.numel() == experts, "fmoe: count has ",
              count.numel(), " numbers, must be contiguous int64 [", experts, "]");
  const auto* counts = count.const_data_ptr<int64_t>();
  int64_t rows = 0;
  for (int64_t e = 0; e < experts; e++) {
    TORCH_CHECK(counts[e] >= 0, "fmoe: count[", e, "]=", counts[e], " is negative");
    rows += counts[e];
  }
  if (!order) {
    TORCH_CHECK(rows == x.size(0), "fmoe: counts add up to ", rows, ", but x has ", x.size(0), " rows");
    TORCH_CHECK(!weight || (weight->numel() == rows && weight->scalar_type() == at::kFloat && weight->is_contiguous()),
                "fmoe: weights of rows must be contiguous float32 with ", rows, " elements, one per row");
    return rows;
  }
  TORCH_CHECK(place && weight && place->dim() == 2 && place->sizes() == weight->sizes() &&
                  place->size(0) == x.size(0) && order->numel() <= place->numel() && rows <= order->numel(),
              "fmoe: order, place and weight do not fit each other, x and the counts");
  TORCH_CHECK(order->scalar_type() == at::kLong && place->scalar_type() == at::kLong &&
                  weight->scalar_type() == at::kFloat && order->is_contiguous() && place->is_contiguous() &&
                  weight->is_contiguous(),
              "fmoe: order and place must be int64, weight float32, all contiguous");
  const auto* index = order->const_data_ptr<int64_t>();
  const auto* places = place->const_data_ptr<int64_t>();
  const int64_t all = place->numel();
  for (int64_t i = 0; i < rows; i++)
    TORCH_CHECK(index[i] >= 0 && index[i] < all, "fmoe: order[", i, "]=", index[i], " is not in 0 .. ", all - 1);
  for (int64_t i = 0; i < all; i++) TORCH_CHECK(places[i] >= 0, "fmoe: place[", i, "]=", places[i], " is negative");
  return rows;
}

template <class F>
void by_type(const Tensor& x, bool wide, F f) {
  if (x.scalar_type() == at::kFloat)
    f(float{}, float{});
  else if (wide)
    f(bf16{}, float{});
  else
    f(bf16{}, bf16{});
}

std::tuple<Tensor, Tensor> expert_ffn(const Tensor& x, const optional<Tensor>& order, const optional<Tensor>& place,
                                      const optional<Tensor>& weight, const Tensor& count, const Tensor& w_in,
                                      const optional<Tensor>& b_in, const Tensor& w_out, const optional<Tensor>& b_out,
                                      int64_t activation, bool gated, bool wide,
                                      bool /*into_main_grad: for the derivative*/) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const int64_t rows = check(x, order, place, weight, count, w_in, b_in, w_out, b_out, activation, gated);
  const Sizes sizes{w_in.size(0), x.size(1), w_out.size(2), w_in.size(1), Activation(activation), gated};
  Met::at(w_in), Met::at(w_out);
  Tensor hidden = Pool::get().take({rows, sizes.p}, x.options());
  Tensor out = Pool::get().take({rows, sizes.d}, x.options());
  by_type(x, wide, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    Weights<T, C> weights{(const T*)data(w_in), (const T*)data(b_in), (const T*)data(w_out), (const T*)data(b_out)};
    forward<T, C>(sizes, (const T*)data(x), (const int64_t*)data(order), order ? place->size(1) : 1,
                  count.const_data_ptr<int64_t>(), weights, (T*)hidden.data_ptr(), (T*)out.data_ptr());
    if (order) out = gather_sum<T>(out, *place, weight->const_data_ptr<float>(), rows);
  });
  return {out, hidden};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// needs: whether gradients of x, weight, w_in, b_in, w_out, b_out are needed. Others are returned empty, as are those
// of w_in and w_out that are added to `sum_in` and `sum_out`.
Gradients expert_ffn_backward(const Tensor& grad, const Tensor& x, const Tensor& hidden, const optional<Tensor>& order,
                              const optional<Tensor>& place, const optional<Tensor>& weight, const Tensor& count,
                              const Tensor& w_in, const optional<Tensor>& b_in, const Tensor& w_out,
                              const optional<Tensor>& b_out, int64_t activation, bool gated, bool wide,
                              at::ArrayRef<bool> needs, const optional<Tensor>& sum_in,
                              const optional<Tensor>& sum_out) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const int64_t rows = check(x, order, place, weight, count, w_in, b_in, w_out, b_out, activation, gated);
  TORCH_CHECK(needs.size() == 6, "fmoe: needs has ", needs.size(), " flags, must have 6");
  TORCH_CHECK(grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type() && grad.is_contiguous(),
              "fmoe: grad is ", grad.sizes(), " ", grad.scalar_type(), ", must be contiguous and like x");
  TORCH_CHECK(hidden.dim() == 2 && hidden.size(0) == rows && hidden.size(1) == w_in.size(1) &&
                  hidden.scalar_type() == x.scalar_type() && hidden.is_contiguous(),
              "fmoe: hidden is ", hidden.sizes(), ", must be contiguous [", rows, ", P] of the dtype of x");
  for (const auto& [sum, like] : {std::pair(&sum_in, &w_in), std::pair(&sum_out, &w_out)})
    TORCH_CHECK(
        !*sum || ((*sum)->scalar_type() == at::kFloat && (*sum)->is_contiguous() && (*sum)->sizes() == like->sizes()),
        "fmoe: sum_in and sum_out must be contiguous float32 of the shapes of w_in and w_out");
  for (const auto* sum : {&sum_in, &sum_out})
    if (*sum) Met::at(**sum);
  const Sizes sizes{w_in.size(0), x.size(1), w_out.size(2), w_in.size(1), Activation(activation), gated};
  auto make = [&](bool needed, const Tensor& like) {
    return needed ? Pool::get().take(like.sizes(), like.options()) : at::empty({0}, like.options());
  };
  Tensor d_rows = needs[0] ? Pool::get().take({rows, sizes.d}, x.options()) : at::empty({0}, x.options());
  Tensor d_weight = weight && needs[1] ? at::zeros_like(*weight) : at::empty({0}, x.options().dtype(at::kFloat));
  Tensor d_in = make(needs[2] && !sum_in, w_in), d_out = make(needs[4] && !sum_out, w_out);
  Tensor d_bias_in = make(needs[3] && b_in, b_in ? *b_in : w_in),
         d_bias_out = make(needs[5] && b_out, b_out ? *b_out : w_out);
  auto gradient = [](bool needed, const Tensor& fresh, const optional<Tensor>& sum) -> Gradient {
    if (!needed) return {};
    return sum ? Gradient{sum->data_ptr(), true} : Gradient{fresh.data_ptr(), false};
  };
  by_type(x, wide, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    Weights<T, C> weights{(const T*)data(w_in), (const T*)data(b_in), (const T*)data(w_out), (const T*)data(b_out)};
    auto pointer = [](const Tensor& t) { return t.numel() ? static_cast<T*>(t.data_ptr()) : nullptr; };
    backward<T, C>(sizes, (const T*)data(grad), (const T*)data(x), (const int64_t*)data(order),
                   order ? place->size(1) : 1, (const float*)data(weight), count.const_data_ptr<int64_t>(),
                   (const T*)data(hidden), weights, pointer(d_rows),
                   d_weight.numel() ? d_weight.data_ptr<float>() : nullptr, gradient(needs[2], d_in, sum_in),
                   pointer(d_bias_in), gradient(needs[4], d_out, sum_out), pointer(d_bias_out));
    if (order && needs[0]) d_rows = gather_sum<T>(d_rows, *place, nullptr, rows);
  });
  return {d_rows, d_weight, d_in, d_bias_in, d_out, d_bias_out};
}

// Initial weights, [L, count]: normal with standard deviation `scale` if `ends` is given, else uniform up to +-`scale`.
Tensor draw(const Tensor& keys, int64_t count, double scale, const optional<Tensor>& ends) {
  TORCH_CHECK(keys.scalar_type() == at::kLong && keys.dim() == 1 && keys.is_contiguous(),
              "fmoe: keys must be contiguous int64 [L]");
  TORCH_CHECK(count >= 0 && count <= int64_t(1) << 32, "fmoe: count=", count, " is not in 0 .. 2^32");
  TORCH_CHECK(!ends || (ends->scalar_type() == at::kFloat && ends->is_contiguous() && ends->numel() == (1 << 16) + 1),
              "fmoe: ends must be contiguous float32 [2^16 + 1]");
  Tensor out = at::empty({keys.numel(), count}, keys.options().dtype(at::kFloat));
  const auto* key = keys.const_data_ptr<int64_t>();
  auto* numbers = out.data_ptr<float>();
  at::parallel_for(0, out.numel(), 1 << 16, [&](int64_t i, int64_t end) {
    while (i < end) {
      const int64_t row = i / count, start = i % count, n = std::min(end - i, count - start);
      if (ends)
        draws().normal(key[row], start, n, scale, ends->const_data_ptr<float>(), numbers + i);
      else
        draws().uniform(key[row], start, n, scale, numbers + i);
      i += n;
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(fmoe_native, m) {
  m.def("draw(Tensor keys, int count, float scale, Tensor? ends) -> Tensor");
  m.def(
      "expert_ffn(Tensor x, Tensor? order, Tensor? place, Tensor? weight, Tensor count, Tensor w_in, Tensor? b_in, "
      "Tensor w_out, Tensor? b_out, int activation, bool gated, bool wide, bool into_main_grad=False) -> "
      "(Tensor out, Tensor hidden)");
  m.def(
      "expert_ffn_backward(Tensor grad, Tensor x, Tensor hidden, Tensor? order, Tensor? place, Tensor? weight, Tensor "
      "count, "
      "Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, int activation, bool gated, bool wide, bool[6] needs, "
      "Tensor(a!)? sum_in, Tensor(b!)? sum_out) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("has_bf16_gemm() -> bool", &has_bf16_gemm);
  m.def("few_rows(int rows) -> int", [](int64_t rows) { return few_rows.exchange(rows); });
  m.def("huge_pages(bool on) -> bool", [](bool on) { return huge_pages.exchange(on); });
  m.def("isa() -> str", [] { return std::string(isa_name()); });
}

TORCH_LIBRARY_IMPL(fmoe_native, CPU, m) {
  m.impl("draw", &draw);
  m.impl("expert_ffn", &expert_ffn);
  m.impl("expert_ffn_backward",
         [](const Tensor& grad, const Tensor& x, const Tensor& hidden, const optional<Tensor>& order,
            const optional<Tensor>& place, const optional<Tensor>& weight, const Tensor& count, const Tensor& w_in,
            const optional<Tensor>& b_in, const Tensor& w_out, const optional<Tensor>& b_out, int64_t activation,
            bool gated, bool wide, std::array<bool, 6> needs, const optional<Tensor>& sum_in,
            const optional<Tensor>& sum_out) {
           return expert_ffn_backward(grad, x, hidden, order, place, weight, count, w_in, b_in, w_out, b_out,
                                      activation, gated, wide, needs, sum_in, sum_out);
         });
}

}  // namespace fmoe

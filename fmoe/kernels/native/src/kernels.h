// Row kernels of an expert's feed-forward block, without torch: compiled once for each instruction set, chosen at run
// time.
//
// Shape letters: n rows, D width, H hidden width, P height of the first map (2 H if gated, else H), K choices. T is the
// type in memory, C that of the GEMMs: bf16 rows may be computed in float.
#pragma once
#include <cstdint>

namespace fmoe {

struct bf16 {
  uint16_t bits;
};

enum Activation : int64_t { GELU = 0, GELU_TANH = 1, RELU = 2, SILU = 3, SWIGLU_OAI = 4 };

// A matrix with two strides, one of which is 1.
template <class T>
struct Strided {
  const T* data;
  int64_t row, column;
  Strided t() const { return {data, column, row}; }
};

// out = a b, or out += a b if `add`: [m, k] by [k, n], in float, by one thread; `row` is the stride of out's rows. Used
// for few rows, where a library repacks a weight matrix for as long as it multiplies. `work`: `Gemms::work` floats.
template <class B, class O>
using Gemm = void (*)(int64_t m, int64_t n, int64_t k, Strided<float> a, Strided<B> b, O* out, int64_t row, bool add,
                      float* work);

template <class T, class C>
struct Kernels {
  // out[i] = x[index[i] / per]; all rows in order if index is null.
  void (*gather)(const T* x, const int64_t* index, int64_t per, int64_t n, int64_t d, C* out);
  void (*widen)(const T* x, int64_t size, C* out);
  void (*narrow)(const C* x, int64_t size, T* out);
  // hidden = u + bias, rounded to T; active = act(hidden), if gated act(first half) * second half, which SWIGLU_OAI
  // transforms too. u may be hidden if T is C. The derivative is also taken at hidden, so that both use the same
  // numbers.
  void (*activate)(const C* u, const T* bias, T* hidden, C* active, int64_t n, int64_t h, Activation act, bool gated);
  // out = y + bias; bias may be null, and y may be out if T is C.
  void (*finish)(const C* y, const T* bias, T* out, int64_t n, int64_t d);
  // Given d_active, the gradient of active without the factor scale: scaled = scale * active, d_hidden = scale *
  // d_active * act'(hidden) and d_scale += <active, d_active>. scale and d_scale may be null, for a scale of one.
  void (*activate_backward)(const T* hidden, const C* d_active, const float* scale, C* scaled, C* d_hidden,
                            float* d_scale, int64_t n, int64_t h, Activation act, bool gated);
  // out[i] = <x[i], v>
  void (*dots)(const C* x, const T* v, int64_t n, int64_t d, float* out);
  // out += sum_i scale[i] * x[i], for columns begin to end of d; scale may be null, for a scale of one
  void (*column_sums)(const C* x, const float* scale, int64_t n, int64_t d, int64_t begin, int64_t end, float* out);
  // out[t] = sum_k weight[t, k] * rows[place[t, k]] over positions below num_rows, in float; weights are one if null.
  void (*gather_sum)(const T* rows, const int64_t* place, const float* weight, int64_t num_rows, int64_t tokens,
                     int64_t k, int64_t d, T* out);
};

struct Gemms {
  Gemm<float, float> ff;  // types of b and out: f is float, b is bf16
  Gemm<bf16, float> bf;
  Gemm<float, bf16> fb;
  Gemm<bf16, bf16> bb;
  int64_t (*work)(int64_t m, int64_t n, int64_t k);
};

// n numbers of one key, from number `start` on (fmoe/experts/initial.py). Every product that enters a sum is exact,
// so that fused multiply-adds change nothing.
struct Draws {
  void (*uniform)(uint64_t key, uint32_t start, int64_t n, float bound, float* out);
  // ends: the 2^16 + 1 ends of 2^16 intervals of equal probability.
  void (*normal)(uint64_t key, uint32_t start, int64_t n, float std, const float* ends, float* out);
};

#define FMOE_DECLARE(ISA)                        \
  namespace ISA {                                \
  extern const Draws draws;                      \
  extern const Gemms gemms;                      \
  extern const Kernels<float, float> kernels_ff; \
  extern const Kernels<bf16, float> kernels_bf;  \
  extern const Kernels<bf16, bf16> kernels_bb;   \
  }
FMOE_DECLARE(isa_default)
#if defined(__x86_64__)
FMOE_DECLARE(isa_avx2)
FMOE_DECLARE(isa_avx512)
#endif

}  // namespace fmoe

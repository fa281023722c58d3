// The activation between the two linear maps of an expert, forward and backward. The blockDim.x threads of one
// threadIdx.y process a row.
//
// Shape letters: M rows, L experts, H hidden width, P = 2 H if gated, else H. N: numbers that a thread processes at
// once.
#include "common.cuh"

namespace fmoe {
// `both` returns act(x) and its derivative. `second` returns value and derivative of the function that gated experts
// apply to the second half. A is the number of the activation, as in fmoe/kernels/native/src/kernels.h.
template <int A>
struct Activation;

struct Pointwise {
  static __device__ __forceinline__ void second(float x, float& value, float& slope) {
    value = x;
    slope = 1.0f;
  }
};

template <>
struct Activation<0> : Pointwise {  // GELU
  static __device__ __forceinline__ void both(float x, float& value, float& slope) {
    const float phi = 0.5f * (1.0f + erff(0.70710678f * x));
    value = x * phi;
    slope = phi + x * 0.39894228f * expf(-0.5f * x * x);
  }
};

template <>
struct Activation<1> : Pointwise {  // GELU, approximated by tanh
  static __device__ __forceinline__ void both(float x, float& value, float& slope) {
    const float a = 0.79788456f, b = 0.044715f;
    const float half = 1.0f / (1.0f + expf(-2.0f * a * (x + b * x * x * x)));  // (1 + tanh) / 2
    value = x * half;
    slope = half + x * 2.0f * half * (1.0f - half) * a * (1.0f + 3.0f * b * x * x);
  }
};

template <>
struct Activation<2> : Pointwise {  // ReLU
  static __device__ __forceinline__ void both(float x, float& value, float& slope) {
    value = x < 0 ? 0.0f : x;  // NaN stays NaN
    slope = x > 0 ? 1.0f : 0.0f;
  }
};

template <>
struct Activation<3> : Pointwise {  // SiLU
  static __device__ __forceinline__ void both(float x, float& value, float& slope) {
    const float s = 1.0f / (1.0f + expf(-x));
    value = x * s;
    slope = s + value * (1.0f - s);
  }
};

template <>
struct Activation<4> {  // SwiGLUOAI of fmoe/kernels/glu.py; comparisons leave NaN
  static __device__ __forceinline__ void both(float x, float& value, float& slope) {
    const float a = 1.702f, g = x > 7.0f ? 7.0f : x;
    const float s = 1.0f / (1.0f + expf(-a * g));
    value = g * s;
    slope = x <= 7.0f ? s + a * value * (1.0f - s) : 0.0f;
  }
  static __device__ __forceinline__ void second(float x, float& value, float& slope) {
    const float low = x < -7.0f ? -7.0f : x;
    value = (low > 7.0f ? 7.0f : low) + 1.0f;
    slope = x >= -7.0f && x <= 7.0f ? 1.0f : 0.0f;
  }
};

// Loads before + bias, rounded to T as stored in `hidden`, so that the derivative is taken at the same value.
template <int N, class T>
__device__ __forceinline__ void load_hidden(const T* before, const T* bias, T* hidden, float (&x)[N]) {
  load<N>(before, x);
  if (bias) {
    float b[N];
    load<N>(bias, b);
#pragma unroll
    for (int j = 0; j < N; j++) {
      T rounded;
      put(&rounded, x[j] + b[j]);
      x[j] = to_float(rounded);
    }
  }
  if (hidden) store<N>(hidden, x);
}

template <int N, int A, bool GATED, class T>
__device__ __forceinline__ void activate_row(const T* before, const T* bias, T* hidden, T* active, i64 width) {
  for (i64 v = i64(threadIdx.x) * N; v + N <= width; v += i64(blockDim.x) * N) {
    float x[N], second[N], slope;
    load_hidden<N>(before + v, bias ? bias + v : nullptr, hidden ? hidden + v : nullptr, x);
    if constexpr (GATED) {
      const i64 u = width + v;
      load_hidden<N>(before + u, bias ? bias + u : nullptr, hidden ? hidden + u : nullptr, second);
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
      Activation<A>::both(x[j], x[j], slope);
      if constexpr (GATED) {
        Activation<A>::second(second[j], second[j], slope);
        x[j] *= second[j];
      }
    }
    store<N>(active + v, x);
  }
}

// Writes a row of the gradients; returns this thread's part of the dot product of active and d_active.
template <int N, int A, bool GATED, class T>
__device__ __forceinline__ float activate_row_backward(const T* hidden, const T* d_active, float weight, T* scaled,
                                                       T* d_hidden, i64 width) {
  float dot = 0;
  for (i64 v = i64(threadIdx.x) * N; v + N <= width; v += i64(blockDim.x) * N) {
    float x[N], second[N], d[N], active[N];
    load<N>(hidden + v, x);
    if constexpr (GATED) load<N>(hidden + width + v, second);
    load<N>(d_active + v, d);
#pragma unroll
    for (int j = 0; j < N; j++) {
      float value, slope, second_slope;
      Activation<A>::both(x[j], value, slope);
      active[j] = value;
      if constexpr (GATED) {
        Activation<A>::second(second[j], second[j], second_slope);
        active[j] *= second[j];
      }
      dot += active[j] * d[j];
      active[j] *= weight;
      d[j] *= weight;
      x[j] = d[j] * slope;
      if constexpr (GATED) {
        x[j] *= second[j];
        second[j] = d[j] * value * second_slope;
      }
    }
    if (scaled) store<N>(scaled + v, active);
    if (d_hidden) {
      store<N>(d_hidden + v, x);
      if constexpr (GATED) store<N>(d_hidden + width + v, second);
    }
  }
  return dot;
}

// hidden = before + bias, active = act(hidden); if gated, act(first half) * second half. `hidden` may be `before`. For
// rows from `limit` on, active is zero and hidden is unchanged.
template <class T, int A, bool GATED>
__global__ void __launch_bounds__(256)
    activate(const T* before_MP, const T* __restrict__ bias_LP, const int* __restrict__ end_L, i64 experts,
             const i64* __restrict__ limit, i64 rows, i64 hidden_width, T* hidden_MP, T* __restrict__ active_MH) {
  constexpr int N = VECTOR<T>;
  const bool is_wide = hidden_width % N == 0 && is_aligned(before_MP, bias_LP, hidden_MP, active_MH);
  const i64 row = own_row(), height = GATED ? 2 * hidden_width : hidden_width;
  if (row >= rows) return;
  T* active = active_MH + row * hidden_width;
  if (row >= rows_kept(limit, rows))
    return is_wide ? clear_row<N>(active, hidden_width) : clear_row<1>(active, hidden_width);
  const T* before = before_MP + row * height;
  T* hidden = hidden_MP ? hidden_MP + row * height : nullptr;
  const T* bias = nullptr;
  if (bias_LP) {
    const i64 expert = segment_of(end_L, experts, row);
    bias = bias_LP + (expert < experts ? expert : experts - 1) * height;
  }
  if (is_wide)
    activate_row<N, A, GATED>(before, bias, hidden, active, hidden_width);
  else
    activate_row<1, A, GATED>(before, bias, hidden, active, hidden_width);
}

// The backward pass of `activate`, in one pass over the hidden rows. d_active is the gradient of active without the
// factor w, the row's combine weight. Computes scaled = w * active (for the gradient of the second map), d_hidden =
// w * d_active * act'(hidden), and the gradient of the combine weight, d_weight = <active, d_active>.
template <class T, int A, bool GATED>
__global__ void __launch_bounds__(256)
    activate_backward(const T* __restrict__ hidden_MP, const T* __restrict__ d_active_MH,
                      const float* __restrict__ weight_N, const i64* __restrict__ perm_M,
                      const i64* __restrict__ limit, i64 rows, i64 hidden_width, T* __restrict__ scaled_MH,
                      T* __restrict__ d_hidden_MP, float* __restrict__ d_weight_N) {
  constexpr int N = VECTOR<T>;
  float* shared = reinterpret_cast<float*>(shared_memory());
  const bool is_wide = hidden_width % N == 0 && is_aligned(hidden_MP, d_active_MH, scaled_MH, d_hidden_MP);
  const i64 row = own_row(), height = GATED ? 2 * hidden_width : hidden_width;
  const i64 index = row < rows ? (perm_M ? perm_M[row] : row) : 0;
  T* scaled = scaled_MH ? scaled_MH + row * hidden_width : nullptr;
  T* d_hidden = d_hidden_MP ? d_hidden_MP + row * height : nullptr;
  float dot = 0;
  if (row < rows_kept(limit, rows)) {
    const T *hidden = hidden_MP + row * height, *d_active = d_active_MH + row * hidden_width;
    const float w = weight_N ? weight_N[index] : 1.0f;
    dot = is_wide ? activate_row_backward<N, A, GATED>(hidden, d_active, w, scaled, d_hidden, hidden_width)
                  : activate_row_backward<1, A, GATED>(hidden, d_active, w, scaled, d_hidden, hidden_width);
  } else if (row < rows) {
    if (scaled) is_wide ? clear_row<N>(scaled, hidden_width) : clear_row<1>(scaled, hidden_width);
    if (d_hidden) is_wide ? clear_row<N>(d_hidden, height) : clear_row<1>(d_hidden, height);
  }
  if (!d_weight_N) return;
  dot = row_sum(dot, shared);
  if (row < rows && threadIdx.x == 0) d_weight_N[index] = dot;
}

}  // namespace fmoe

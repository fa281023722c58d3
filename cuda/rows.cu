// Rows from token order to expert order and back. Every kernel gathers, and none adds by atomics. The blockDim.x
// threads of one threadIdx.y process a row.
//
// Shape letters: T tokens, K choices, D width, M rows, L experts. N: numbers that a thread processes at once.
#include "common.cuh"

namespace fmoe {
constexpr int AHEAD = 4;  // loads in flight before the first store

// out = scale * x, converted. Fewer loads in flight, because numbers are wider in registers than in memory.
template <int N, class In, class Out>
__device__ __forceinline__ void copy_row(const In* x, Out* out, i64 width, bool is_scaled, float scale) {
  constexpr int AHEAD = 2;
  const i64 vectors = width / N, step = blockDim.x;
  for (i64 v = threadIdx.x; v < vectors; v += AHEAD * step) {
    float values[AHEAD][N];
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
      if (v + a * step < vectors) load<N>(x + (v + a * step) * N, values[a]);
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      if (v + a * step >= vectors) continue;
      if (is_scaled) {
#pragma unroll
        for (int j = 0; j < N; j++) values[a][j] *= scale;
      }
      store<N>(out + (v + a * step) * N, values[a]);
    }
  }
}

// The same without conversion.
template <class V>
__device__ __forceinline__ void copy_vectors(const V* x, V* out, i64 vectors) {
  const i64 step = blockDim.x;
  for (i64 v = threadIdx.x; v < vectors; v += AHEAD * step) {
    V values[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
      if (v + a * step < vectors) values[a] = x[v + a * step];
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
      if (v + a * step < vectors) out[v + a * step] = values[a];
  }
}

template <class A, class B>
struct Same {
  static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
  static constexpr bool value = true;
};

// N numbers in the format of memory, so that several loads can be in flight; zeros if nothing is loaded.
template <int N, class T>
struct Raw {
  static_assert(N * sizeof(T) == 16, "a vector");
  uint4 bits;
  __device__ __forceinline__ Raw() : bits(make_uint4(0, 0, 0, 0)) {}
  __device__ __forceinline__ explicit Raw(const T* p) : bits(*reinterpret_cast<const uint4*>(p)) {}
  __device__ __forceinline__ void read(float (&x)[N]) const { unpack(bits, x, static_cast<const T*>(nullptr)); }
};

template <class T>
struct Raw<1, T> {
  T value;
  __device__ __forceinline__ Raw() : value() {}
  __device__ __forceinline__ explicit Raw(const T* p) : value(*p) {}
  __device__ __forceinline__ void read(float (&x)[1]) const { x[0] = to_float(value); }
};

// out[i] = scale[index[i]] * x[index[i] / per]; x[i] if index is null. Rows from `limit` on, and rows with an index
// below 0, are zero.
template <class In, class Out>
__global__ void __launch_bounds__(256)
    gather(const In* __restrict__ x, const i64* __restrict__ index_M, i64 per, const float* __restrict__ scale,
           const i64* __restrict__ limit, i64 rows, i64 width, Out* __restrict__ out) {
  constexpr int N = VECTOR<In, Out>;
  const bool is_wide = width % N == 0 && is_aligned(x, out);
  const i64 row = own_row();
  if (row >= rows) return;
  Out* to = out + row * width;
  const i64 index = row >= rows_kept(limit, rows) ? -1 : index_M ? index_M[row] : row;
  if (index < 0) return is_wide ? clear_row<N>(to, width) : clear_row<1>(to, width);
  const In* from = x + index / per * width;
  const float by = scale ? scale[index] : 1.0f;
  if constexpr (Same<In, Out>::value) {
    if (!scale) {
      if (!is_wide) return copy_vectors(from, to, width);
      return copy_vectors(reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(to), width / N);
    }
  }
  is_wide ? copy_row<N>(from, to, width, scale != nullptr, by) : copy_row<1>(from, to, width, scale != nullptr, by);
}

template <int N, class T>
__device__ __forceinline__ void combine_row(const T* rows, const i64* place, const float* weight, i64 bound, int top_k,
                                            i64 width, T* out) {
  for (i64 v = threadIdx.x; v < width / N; v += blockDim.x) {
    float sum[N] = {};
#pragma unroll 1
    for (int first = 0; first < top_k; first += AHEAD) {
      Raw<N, T> raw[AHEAD];
      float w[AHEAD];
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        const int k = first + a;
        const i64 at = k < top_k ? place[k] : -1;
        const bool is_kept = u64(at) < u64(bound);
        w[a] = !is_kept ? 0.0f : weight ? weight[k] : 1.0f;
        raw[a] = is_kept ? Raw<N, T>(rows + at * width + v * N) : Raw<N, T>();
      }
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        float x[N];
        raw[a].read(x);
#pragma unroll
        for (int j = 0; j < N; j++) sum[j] += w[a] * x[j];
      }
    }
    store<N>(out + v * N, sum);
  }
}

// d_row = w * d_out if d_row is not null; returns this thread's part of <d_out, row> if row is not null.
template <int N, class T>
__device__ __forceinline__ float combine_row_backward(const T* d_out, const T* row, float w, i64 width, T* d_row) {
  float dot = 0;
  for (i64 v = threadIdx.x; v < width / N; v += blockDim.x) {
    float d[N], x[N];
    load<N>(d_out + v * N, d);
    if (row) {
      load<N>(row + v * N, x);
#pragma unroll
      for (int j = 0; j < N; j++) dot += d[j] * x[j];
    }
    if (d_row) {
#pragma unroll
      for (int j = 0; j < N; j++) d[j] *= w;
      store<N>(d_row + v * N, d);
    }
  }
  return dot;
}

// out[t] = sum over k of weight[t, k] * rows[place[t, k]], in float and in this order, over kept assignments.
template <class T>
__global__ void __launch_bounds__(256)
    combine(const T* __restrict__ rows, const i64* __restrict__ place_TK, const float* __restrict__ weight_TK,
            const i64* __restrict__ limit, i64 tokens, i64 top_k, i64 num_rows, i64 width, T* __restrict__ out_TD) {
  constexpr int N = VECTOR<T>;
  const i64 t = own_row(), bound = rows_kept(limit, num_rows);
  if (t >= tokens) return;
  const i64* place = place_TK + t * top_k;
  const float* weight = weight_TK ? weight_TK + t * top_k : nullptr;
  if (width % N == 0 && is_aligned(rows, out_TD))
    combine_row<N>(rows, place, weight, bound, int(top_k), width, out_TD + t * width);
  else
    combine_row<1>(rows, place, weight, bound, int(top_k), width, out_TD + t * width);
}

// d_rows[place[t, k]] = weight[t, k] * d_out[t] and d_weight[t, k] = <d_out[t], rows[place[t, k]]>. Every row is
// written by its only assignment; rows from `limit` to `num_rows` are zero.
template <class T>
__global__ void __launch_bounds__(256)
    combine_backward(const T* __restrict__ d_out_TD, const T* __restrict__ rows, const i64* __restrict__ place_TK,
                     const float* __restrict__ weight_TK, const i64* __restrict__ limit, i64 tokens, i64 top_k,
                     i64 num_rows, i64 width, T* __restrict__ d_rows, float* __restrict__ d_weight_TK) {
  constexpr int N = VECTOR<T>;
  float* shared = reinterpret_cast<float*>(shared_memory());
  const bool is_wide = width % N == 0 && is_aligned(d_out_TD, rows, d_rows);
  const i64 t = own_row(), bound = rows_kept(limit, num_rows);
  const T* d_out = d_out_TD + t * width;
  for (i64 k = 0; k < top_k; k++) {
    const i64 at = t < tokens ? place_TK[t * top_k + k] : -1;
    float dot = 0;
    if (u64(at) < u64(bound)) {
      const float w = weight_TK ? weight_TK[t * top_k + k] : 1.0f;
      const T* row = d_weight_TK ? rows + at * width : nullptr;
      T* d_row = d_rows ? d_rows + at * width : nullptr;
      dot = is_wide ? combine_row_backward<N>(d_out, row, w, width, d_row)
                    : combine_row_backward<1>(d_out, row, w, width, d_row);
    } else if (d_rows && u64(at) < u64(num_rows)) {
      is_wide ? clear_row<N>(d_rows + at * width, width) : clear_row<1>(d_rows + at * width, width);
    }
    if (!d_weight_TK) continue;
    dot = row_sum(dot, shared);
    if (t < tokens && threadIdx.x == 0) d_weight_TK[t * top_k + k] = dot;
  }
}

template <int N, class T>
__device__ __forceinline__ void add_row(const T* x, const T* bias, i64 width, T* out) {
  for (i64 v = threadIdx.x; v < width / N; v += blockDim.x) {
    float a[N], b[N];
    load<N>(x + v * N, a);
    load<N>(bias + v * N, b);
#pragma unroll
    for (int j = 0; j < N; j++) a[j] += b[j];
    store<N>(out + v * N, a);
  }
}

// out = rows + the bias of their expert; `out` may be `rows`. Rows past the last expert's are zero.
template <class T>
__global__ void __launch_bounds__(256) add_bias(const T* rows, const T* __restrict__ bias_LD,
                                                const int* __restrict__ end_L, i64 experts, i64 num_rows, i64 width,
                                                T* out) {
  constexpr int N = VECTOR<T>;
  const bool is_wide = width % N == 0 && is_aligned(rows, bias_LD, out);
  const i64 row = own_row();
  if (row >= num_rows) return;
  const i64 expert = segment_of(end_L, experts, row);
  T* to = out + row * width;
  if (expert == experts) return is_wide ? clear_row<N>(to, width) : clear_row<1>(to, width);
  const T *x = rows + row * width, *bias = bias_LD + expert * width;
  is_wide ? add_row<N>(x, bias, width, to) : add_row<1>(x, bias, width, to);
}

// out[e] = sum over the rows i of expert e of scale[index[i]] * rows[i]; zero for an expert without rows. Block (32,
// 32): 32 columns of an expert, with its rows over threadIdx.y.
template <class T, class Out>
__global__ void __launch_bounds__(1024)
    column_sums(const T* __restrict__ rows, const float* __restrict__ scale, const i64* __restrict__ index_M,
                const int* __restrict__ end_L, i64 experts, i64 width, Out* __restrict__ out_LD) {
  float* shared = reinterpret_cast<float*>(shared_memory());  // [32, 33]
  const i64 expert = blockIdx.y, column = i64(blockIdx.x) * 32 + threadIdx.x;
  const i64 begin = expert ? end_L[expert - 1] : 0, end = end_L[expert];
  float sum = 0;
  if (column < width) {
#pragma unroll 4
    for (i64 i = begin + threadIdx.y; i < end; i += 32) {
      const float by = scale ? scale[index_M ? index_M[i] : i] : 1.0f;
      sum += by * to_float(rows[i * width + column]);
    }
  }
  shared[threadIdx.y * 33 + threadIdx.x] = sum;
  __syncthreads();
  sum = warp_sum(shared[threadIdx.x * 33 + threadIdx.y]);
  const i64 own = i64(blockIdx.x) * 32 + threadIdx.y;
  if (threadIdx.x == 0 && own < width) put(out_LD + expert * width + own, sum);
}

}  // namespace fmoe

// Rows from token order to expert order and back. Every kernel gathers, and none adds by atomics. The blockDim.x
// threads of one threadIdx.y process a row.
//
// Shape letters: T tokens, K choices, D width, M rows, L experts. N: numbers that a thread processes at once.
#include "common.cuh"

namespace fmoe {
constexpr int AHEAD = 4;  // loads in flight before the first store

// out = scale * x, converted. Fewer loads are in flight than in copy_vectors, because converted numbers need more
// registers.
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

// Copies a row without scale and conversion.
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

// N numbers as they are in memory, so that several loads can be in flight; zeros if nothing is loaded.
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

// One row of `combine`. `bias_LD` is null, or the bias of the experts, whose rows end at `end_L`.
template <int N, class T>
__device__ __forceinline__ void combine_row(const T* rows, const i64* inverse, const float* weight, i64 bound,
                                            int top_k, i64 width, const T* bias_LD, const int* end_L, i64 experts,
                                            T* out) {
  for (i64 v = threadIdx.x; v < width / N; v += blockDim.x) {
    float sum[N] = {};
#pragma unroll 1
    for (int first = 0; first < top_k; first += AHEAD) {
      Raw<N, T> raw[AHEAD];
      float w[AHEAD];
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        const int k = first + a;
        const i64 at = k < top_k ? inverse[k] : -1;
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
#pragma unroll 1
    for (int k = 0; bias_LD && k < top_k; k++) {
      if (u64(inverse[k]) >= u64(bound)) continue;
      const float w = weight ? weight[k] : 1.0f;
      float b[N];
      load<N>(bias_LD + segment_of(end_L, experts, inverse[k]) * width + v * N, b);
#pragma unroll
      for (int j = 0; j < N; j++) sum[j] += w * b[j];
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

// out[t] = sum over k of weight[t, k] * (rows[inverse[t, k]] + its expert's bias), in float and in a fixed order, over
// the kept assignments.
template <class T>
__global__ void __launch_bounds__(256)
    combine(const T* __restrict__ rows, const i64* __restrict__ inverse_TK, const float* __restrict__ weight_TK,
            const i64* __restrict__ limit, const T* __restrict__ bias_LD, const int* __restrict__ end_L, i64 experts,
            i64 tokens, i64 top_k, i64 num_rows, i64 width, T* __restrict__ out_TD) {
  constexpr int N = VECTOR<T>;
  const i64 t = own_row(), bound = rows_kept(limit, num_rows);
  if (t >= tokens) return;
  const i64* inverse = inverse_TK + t * top_k;
  const float* weight = weight_TK ? weight_TK + t * top_k : nullptr;
  T* out = out_TD + t * width;
  if (width % N == 0 && is_aligned(rows, bias_LD, out_TD))
    combine_row<N>(rows, inverse, weight, bound, int(top_k), width, bias_LD, end_L, experts, out);
  else
    combine_row<1>(rows, inverse, weight, bound, int(top_k), width, bias_LD, end_L, experts, out);
}

// d_rows[inverse[t, k]] = weight[t, k] * d_out[t] and d_weight[t, k] = <d_out[t], rows[inverse[t, k]]>. Every row is
// written by its only assignment; rows from `limit` to `num_rows` are zero.
template <class T>
__global__ void __launch_bounds__(256)
    combine_backward(const T* __restrict__ d_out_TD, const T* __restrict__ rows, const i64* __restrict__ inverse_TK,
                     const float* __restrict__ weight_TK, const i64* __restrict__ limit, i64 tokens, i64 top_k,
                     i64 num_rows, i64 width, T* __restrict__ d_rows, float* __restrict__ d_weight_TK) {
  constexpr int N = VECTOR<T>;
  float* shared = reinterpret_cast<float*>(shared_memory());
  const bool is_wide = width % N == 0 && is_aligned(d_out_TD, rows, d_rows);
  const i64 t = own_row(), bound = rows_kept(limit, num_rows);
  const T* d_out = d_out_TD + t * width;
  for (i64 k = 0; k < top_k; k++) {
    const i64 at = t < tokens ? inverse_TK[t * top_k + k] : -1;
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

// The gradient of one expert's bias, in the block's 32 columns: the sum of weight[perm[i]] * rows[perm[i] / per] over
// the expert's rows i. `shared`: a float per thread. All threads of the block must call it.
template <class T>
__device__ __forceinline__ void sum_columns(const T* rows, const i64* perm_M, i64 per, const float* weight,
                                            const int* end_L, i64 expert, i64 chunk, i64 width, float* shared,
                                            T* out_LD) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread % 32;
  const int warps = blockDim.x * blockDim.y / 32;
  const i64 column = chunk * 32 + lane, end = end_L[expert];
  float sum = 0;
  if (column < width) {
#pragma unroll 4
    for (i64 i = (expert ? end_L[expert - 1] : 0) + thread / 32; i < end; i += warps) {
      const i64 index = perm_M ? perm_M[i] : i;
      const float by = weight ? weight[index] : 1.0f;
      sum += by * to_float(rows[index / per * width + column]);
    }
  }
  shared[thread] = sum;
  __syncthreads();
  if (thread >= 32 || column >= width) return;
  for (int w = 1; w < warps; w++) sum += shared[w * 32 + lane];
  put(out_LD + expert * width + column, sum);
}

// Gradients of the biases, and, to save a launch, those of tokens and weights. The first blocks sum columns for the
// biases. The others process tokens: d_x[t] = sum over k of d_rows[inverse[t, k]], and d_weight[t, k] += <d_out[t],
// second bias of the expert of inverse[t, k]>. With registers for four blocks per multiprocessor, none spills.
template <class T>
__global__ void __launch_bounds__(256, 4)
    bias_gradients(const T* __restrict__ d_out, const i64* __restrict__ perm_M, const float* __restrict__ weight_N,
                   const T* __restrict__ d_hidden_MP, const int* __restrict__ end_L, i64 experts, i64 width, i64 height,
                   T* __restrict__ d_bias_in_LP, T* __restrict__ d_bias_out_LD, const i64* __restrict__ inverse_TK,
                   const i64* __restrict__ limit, i64 tokens, i64 top_k, i64 num_rows, const T* __restrict__ d_rows_MD,
                   T* __restrict__ d_x_TD, const T* __restrict__ bias_out_LD, float* __restrict__ d_weight_TK) {
  constexpr int N = VECTOR<T>;
  float* shared = reinterpret_cast<float*>(shared_memory());
  const i64 of_in = d_bias_in_LP ? (height + 31) / 32 : 0, of_out = d_bias_out_LD ? (width + 31) / 32 : 0;
  const i64 of_expert = of_in + of_out, block = blockIdx.x;
  if (block < experts * of_expert) {
    const i64 expert = block / of_expert, chunk = block % of_expert;
    if (chunk < of_in)
      sum_columns<T>(d_hidden_MP, nullptr, 1, nullptr, end_L, expert, chunk, height, shared, d_bias_in_LP);
    else
      sum_columns<T>(d_out, perm_M, top_k, weight_N, end_L, expert, chunk - of_in, width, shared, d_bias_out_LD);
    return;
  }
  const i64 t = (block - experts * of_expert) * blockDim.y + threadIdx.y;
  const i64* inverse = inverse_TK + t * top_k;
  if (d_x_TD && t < tokens) {
    const i64 bound = rows_kept(limit, num_rows);
    if (width % N == 0 && is_aligned(d_rows_MD, d_x_TD))
      combine_row<N, T>(d_rows_MD, inverse, nullptr, bound, int(top_k), width, nullptr, nullptr, 0, d_x_TD + t * width);
    else
      combine_row<1, T>(d_rows_MD, inverse, nullptr, bound, int(top_k), width, nullptr, nullptr, 0, d_x_TD + t * width);
  }
  if (!d_weight_TK) return;
  const bool is_wide = width % N == 0 && is_aligned(d_out, bias_out_LD);
  const T* d = d_out + t * width;
  for (i64 k = 0; k < top_k; k++) {
    const i64 expert = t < tokens ? segment_of(end_L, experts, inverse[k]) : experts;
    const T* bias = bias_out_LD + expert * width;
    float dot = 0;
    if (expert < experts)
      dot = is_wide ? combine_row_backward<N, T>(d, bias, 0.0f, width, nullptr)
                    : combine_row_backward<1, T>(d, bias, 0.0f, width, nullptr);
    dot = row_sum(dot, shared);
    if (expert < experts && threadIdx.x == 0) d_weight_TK[t * top_k + k] += dot;
  }
}

// The noise of `fmoe.random`: MurmurHash3's finalizer twice, of a counter and the two halves of a key.
__device__ __forceinline__ u32 mix(u32 x) {
  x ^= x >> 16, x *= 0x85ebca6bu;
  x ^= x >> 13, x *= 0xc2b2ae35u;
  return x ^ x >> 16;
}

// The key of a routing group: splitmix64's finalizer.
__device__ __forceinline__ u64 fold(u64 key, u64 index) {
  u64 x = key + (index + 1) * 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

template <int N, class T>
__device__ __forceinline__ void jitter_row(const T* x, const T* addend, u64 key, i64 first, float half_width, i64 width,
                                           T* out, T* change) {
  for (i64 v = threadIdx.x; v < width / N; v += blockDim.x) {
    float value[N], more[N] = {}, difference[N];
    load<N>(x + v * N, value);
    if (addend) load<N>(addend + v * N, more);
    u32 hash = 0;
#pragma unroll
    for (int j = 0; j < N; j++) {
      const i64 n = first + v * N + j;
      if (j == 0 || j % 2 == 0) hash = mix(mix(u32(n / 2) * 0x9e3779b1u + u32(key)) ^ u32(key >> 32));
      const float uniform = float(short(n % 2 ? hash >> 16 : hash & 0xffff)) * 0x1p-16f + 0.5f;
      difference[j] = value[j] * (uniform * 2.0f * half_width - half_width);
      value[j] += difference[j] + more[j];
    }
    if (out) store<N>(out + v * N, value);
    if (change) store<N>(change + v * N, difference);
  }
}

// out = x * noise + addend and change = x * (noise - 1), with the noise of each element uniform in [1 - half_width, 1 +
// half_width): on every device, the numbers of `RoutingGroups.local_uniform16` for this key, scaled.
template <class T>
__global__ void __launch_bounds__(256)
    jitter(const T* __restrict__ x_TD, const T* __restrict__ addend_TD, i64 key, i64 first_group, double half_width,
           i64 tokens, i64 width, i64 group_size, i64 sequences, i64 sequence_length, T* __restrict__ out_TD,
           T* __restrict__ change_TD) {
  constexpr int N = VECTOR<T>;
  const i64 t = own_row();
  if (t >= tokens) return;
  const i64 u = sequences > 1 ? t % sequences * sequence_length + t / sequences : t;
  const u64 own = fold(u64(key), u64(first_group + u / group_size));
  const i64 first = u % group_size * width, at = t * width;
  const T* addend = addend_TD ? addend_TD + at : nullptr;
  T *out = out_TD ? out_TD + at : nullptr, *change = change_TD ? change_TD + at : nullptr;
  if (width % N == 0 && is_aligned(x_TD, addend_TD, out_TD, change_TD))
    jitter_row<N>(x_TD + at, addend, own, first, float(half_width), width, out, change);
  else
    jitter_row<1>(x_TD + at, addend, own, first, float(half_width), width, out, change);
}

}  // namespace fmoe

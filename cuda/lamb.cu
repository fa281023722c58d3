// LAMB over many tensors, with each expert of a stack as a separate tensor: moments and squares of norms, their sums
// per expert, the step. A thread block processes a chunk: at most 65,536 elements of one tensor and of one expert.
//
// Sums of squares are in double, in which none overflows, and in a fixed order. The update is computed again for the
// step, because keeping it would take as much memory as the weights.
#include "common.cuh"

namespace fmoe {
struct Chunk {
  u64 weight, gradient, exp_avg, exp_avg_sq;
  i64 size;
  i64 owner;  // block << 32 | slot; negative for a vector, which has neither decay nor trust ratio

  __device__ __forceinline__ bool is_vector() const { return owner < 0; }
  __device__ __forceinline__ i64 block() const { return owner >> 32; }
  __device__ __forceinline__ i64 slot() const { return owner & 0xffffffff; }
};

struct Options {
  float one_minus_beta1, beta2, eps, factor, weight_decay, lr, max_trust, one_minus_beta2;

  // m_hat / (sqrt(v_hat) + eps) + weight_decay * w; `factor` and `eps` include the corrections of both moments.
  __device__ __forceinline__ float update(float w, float m, float v, bool is_vector) const {
    const float adam = factor * (m / (sqrtf(v) + eps));
    return is_vector ? adam : weight_decay * w + adam;
  }
};

struct Squares {
  double weight = 0, update = 0;
};

// Loads the N numbers of a thread; one by one if they are not aligned, but each thread loads the same ones either way.
template <bool WIDE, int N, class T>
__device__ __forceinline__ void load_some(const T* p, float (&x)[N]) {
  if constexpr (WIDE) {
    load<N>(p, x);
  } else {
#pragma unroll
    for (int j = 0; j < N; j++) x[j] = to_float(p[j]);
  }
}

template <bool WIDE, int N, class T>
__device__ __forceinline__ void store_some(T* p, const float (&x)[N]) {
  if constexpr (WIDE) {
    store<N>(p, x);
  } else {
#pragma unroll
    for (int j = 0; j < N; j++) put(p + j, x[j]);
  }
}

// Updates the moments and sums squares, in an order that does not depend on the address: an expert of a stack is
// stepped bit for bit like a separate tensor.
template <bool WIDE, int N, class T, class G>
__device__ __forceinline__ Squares measure(const Chunk& chunk, const Options& o) {
  const T* weight = reinterpret_cast<const T*>(chunk.weight);
  const G* gradient = reinterpret_cast<const G*>(chunk.gradient);
  float* exp_avg = reinterpret_cast<float*>(chunk.exp_avg);
  float* exp_avg_sq = reinterpret_cast<float*>(chunk.exp_avg_sq);
  Squares sum;
  for (i64 i = i64(threadIdx.x) * N; i + N <= chunk.size; i += i64(blockDim.x) * N) {
    float w[N], g[N], m[N], v[N];
    load_some<WIDE>(weight + i, w);
    load_some<WIDE>(gradient + i, g);
    load_some<WIDE>(exp_avg + i, m);
    load_some<WIDE>(exp_avg_sq + i, v);
#pragma unroll
    for (int j = 0; j < N; j++) {
      m[j] += o.one_minus_beta1 * (g[j] - m[j]);
      v[j] = o.beta2 * v[j] + o.one_minus_beta2 * g[j] * g[j];
      const float u = o.update(w[j], m[j], v[j], false);
      sum.weight += double(w[j]) * double(w[j]);
      sum.update += double(u) * double(u);
    }
    store_some<WIDE>(exp_avg + i, m);
    store_some<WIDE>(exp_avg_sq + i, v);
  }
  return sum;
}

template <bool WIDE, int N, class T>
__device__ __forceinline__ void step(const Chunk& chunk, const Options& o, float rate) {
  T* weight = reinterpret_cast<T*>(chunk.weight);
  const float* exp_avg = reinterpret_cast<const float*>(chunk.exp_avg);
  const float* exp_avg_sq = reinterpret_cast<const float*>(chunk.exp_avg_sq);
  for (i64 i = i64(threadIdx.x) * N; i + N <= chunk.size; i += i64(blockDim.x) * N) {
    float w[N], m[N], v[N];
    load_some<WIDE>(weight + i, w);
    load_some<WIDE>(exp_avg + i, m);
    load_some<WIDE>(exp_avg_sq + i, v);
#pragma unroll
    for (int j = 0; j < N; j++) w[j] -= rate * o.update(w[j], m[j], v[j], chunk.is_vector());
    store_some<WIDE>(weight + i, w);
  }
}

// Elements past the last whole vector, as a separate chunk.
template <class T, class G>
__device__ __forceinline__ Chunk rest_of(Chunk chunk, int n) {
  const i64 whole = chunk.size / n * n;
  chunk.weight += whole * sizeof(T), chunk.gradient += whole * sizeof(G);
  chunk.exp_avg += whole * 4, chunk.exp_avg_sq += whole * 4;
  chunk.size -= whole;
  return chunk;
}

__device__ __forceinline__ bool is_wide(u64 a, u64 b, u64 c, u64 d) { return ((a | b | c | d) & 15) == 0; }

// Updates the moments with the gradients; partial [C, 2]: sums of squares of each chunk's weights and updates.
template <class T, class G>
__global__ void __launch_bounds__(512) lamb_measure(const i64* __restrict__ chunks, const float* __restrict__ options,
                                                    double* __restrict__ partial_C2) {
  constexpr int N = VECTOR<T, G>;
  double* shared = reinterpret_cast<double*>(shared_memory());  // two per warp
  const Chunk chunk = reinterpret_cast<const Chunk*>(chunks)[blockIdx.x];
  const Options o = reinterpret_cast<const Options*>(options)[chunk.slot()];
  Squares sum = is_wide(chunk.weight, chunk.gradient, chunk.exp_avg, chunk.exp_avg_sq)
                    ? measure<true, N, T, G>(chunk, o)
                    : measure<false, N, T, G>(chunk, o);
  const Squares rest = measure<true, 1, T, G>(rest_of<T, G>(chunk, N), o);
  sum.weight += rest.weight, sum.update += rest.update;
  sum.weight = warp_sum(sum.weight), sum.update = warp_sum(sum.update);
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (threadIdx.x % 32 == 0) shared[2 * warp] = sum.weight, shared[2 * warp + 1] = sum.update;
  __syncthreads();
  if (threadIdx.x >= 2) return;
  double total = 0;
  for (int w = 0; w < warps; w++) total += shared[2 * w + threadIdx.x];
  partial_C2[2 * i64(blockIdx.x) + threadIdx.x] = total;
}

// squares [2, O]: sums over the chunks of each block, one warp per block.
__global__ void __launch_bounds__(256) lamb_norms(const double* __restrict__ partial_C2,
                                                  const i64* __restrict__ first_O, i64 blocks,
                                                  double* __restrict__ squares_2O) {
  const i64 block = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (block >= blocks) return;
  Squares sum;
  for (i64 c = first_O[block] + threadIdx.x % 32; c < first_O[block + 1]; c += 32)
    sum.weight += partial_C2[2 * c], sum.update += partial_C2[2 * c + 1];
  sum.weight = warp_sum(sum.weight), sum.update = warp_sum(sum.update);
  if (threadIdx.x % 32) return;
  squares_2O[block] = sum.weight;
  squares_2O[blocks + block] = sum.update;
}

// w -= lr * ratio * u, with ratio = |w| / |u|, or 1 if either norm is 0, but at most max_trust; 1 for vectors.
template <class T>
__global__ void __launch_bounds__(512) lamb_update(const i64* __restrict__ chunks, const float* __restrict__ options,
                                                   const double* __restrict__ squares_2O, i64 blocks,
                                                   float* __restrict__ ratio_O) {
  constexpr int N = VECTOR<T>;
  const Chunk chunk = reinterpret_cast<const Chunk*>(chunks)[blockIdx.x];
  const Options o = reinterpret_cast<const Options*>(options)[chunk.slot()];
  float ratio = 1;
  if (!chunk.is_vector()) {
    const double weight = sqrt(squares_2O[chunk.block()]), update = sqrt(squares_2O[blocks + chunk.block()]);
    if (weight > 0 && update > 0) ratio = float(weight / update);
    ratio = fminf(ratio, o.max_trust);
    if (threadIdx.x == 0) ratio_O[chunk.block()] = ratio;  // all chunks of a block write the same value
  }
  if (is_wide(chunk.weight, chunk.exp_avg, chunk.exp_avg_sq, 0))
    step<true, N, T>(chunk, o, o.lr * ratio);
  else
    step<false, N, T>(chunk, o, o.lr * ratio);
  step<true, 1, T>(rest_of<T, T>(chunk, N), o, o.lr * ratio);
}

}  // namespace fmoe

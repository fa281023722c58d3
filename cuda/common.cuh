// Common functions of the kernels: 16-bit numbers, accesses of 16 bytes, sums and scans in a fixed order. This is the
// only header, so that NVRTC needs none of CUDA's.
//
// All shared memory is dynamic; the caller sets its size (docs/kernels.md).
#pragma once

namespace fmoe {

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;

struct f16 {
  unsigned short bits;
};
struct bf16 {
  unsigned short bits;
};

constexpr u32 FULL = 0xffffffffu;  // all lanes of a warp

#ifndef FMOE_EMULATED  // tests/cuda/emulation has these in C++
__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

// Round two floats to nearest, ties to even; the first is in the low half.
__device__ __forceinline__ u32 two_halves(float low, float high) {
  u32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

__device__ __forceinline__ u32 two_bfloats(float low, float high) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

__device__ __forceinline__ char* shared_memory() {
  extern __shared__ uint4 fmoe_shared[];
  return reinterpret_cast<char*>(fmoe_shared);
}
#endif

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(f16 x) { return half_to_float(x.bits); }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }

__device__ __forceinline__ void put(float* p, float x) { *p = x; }
__device__ __forceinline__ void put(f16* p, float x) { p->bits = (unsigned short)two_halves(x, 0.0f); }
__device__ __forceinline__ void put(bf16* p, float x) { p->bits = (unsigned short)two_bfloats(x, 0.0f); }

__device__ __forceinline__ void unpack(uint4 v, float* x, const float*) {
  x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y), x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
}

__device__ __forceinline__ void unpack(uint4 v, float* x, const bf16*) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void unpack(uint4 v, float* x, const f16*) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x[2 * i] = half_to_float((unsigned short)words[i]);
    x[2 * i + 1] = half_to_float((unsigned short)(words[i] >> 16));
  }
}

__device__ __forceinline__ uint4 pack(const float* x, float*) {
  return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}
__device__ __forceinline__ uint4 pack(const float* x, f16*) {
  return make_uint4(two_halves(x[0], x[1]), two_halves(x[2], x[3]), two_halves(x[4], x[5]), two_halves(x[6], x[7]));
}
__device__ __forceinline__ uint4 pack(const float* x, bf16*) {
  return make_uint4(two_bfloats(x[0], x[1]), two_bfloats(x[2], x[3]), two_bfloats(x[4], x[5]),
                    two_bfloats(x[6], x[7]));
}

// Loads N numbers from p: one, or as many as fill one or two vectors of 16 bytes; p must then be aligned to 16 bytes.
template <int N, class T>
__device__ __forceinline__ void load(const T* p, float (&x)[N]) {
  if constexpr (N == 1) {
    x[0] = to_float(*p);
  } else {
    constexpr int EACH = 16 / sizeof(T);
    static_assert(N % EACH == 0, "whole vectors");
#pragma unroll
    for (int i = 0; i < N / EACH; i++) unpack(reinterpret_cast<const uint4*>(p)[i], x + i * EACH, p);
  }
}

template <int N, class T>
__device__ __forceinline__ void store(T* p, const float (&x)[N]) {
  if constexpr (N == 1) {
    put(p, x[0]);
  } else {
    constexpr int EACH = 16 / sizeof(T);
    static_assert(N % EACH == 0, "whole vectors");
#pragma unroll
    for (int i = 0; i < N / EACH; i++) reinterpret_cast<uint4*>(p)[i] = pack(x + i * EACH, p);
  }
}

// Count of numbers that a thread processes at once if width and alignment allow it: 16 bytes of the smaller type.
template <class A, class B = A>
constexpr int VECTOR = 16 / (sizeof(A) < sizeof(B) ? sizeof(A) : sizeof(B));

__device__ __forceinline__ bool is_aligned() { return true; }
template <class T, class... Rest>
__device__ __forceinline__ bool is_aligned(const T* p, const Rest*... rest) {
  return (reinterpret_cast<u64>(p) & 15) == 0 && is_aligned(rest...);
}

__device__ __forceinline__ i64 at_most(i64 a, i64 b) { return a < b ? a : b; }

// The xor butterfly adds the same pairs in every lane, so all lanes get the same bits.
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int m = 16; m; m >>= 1) x += __shfl_xor_sync(FULL, x, m);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int m = 16; m; m >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, m));
  return x;
}

// Sum of x over this lane and the lanes before it.
__device__ __forceinline__ int warp_scan(int x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int before = __shfl_up_sync(FULL, x, d);
    if (lane >= d) x += before;
  }
  return x;
}

// Sum over the blockDim.x threads of one threadIdx.y, returned to all of them. `shared`: one float per warp. All
// threads of the block must call it.
__device__ __forceinline__ float row_sum(float x, float* shared) {
  x = warp_sum(x);
  if (blockDim.x == 32) return x;
  const int warps = blockDim.x / 32;
  float* row = shared + threadIdx.y * warps;
  if (threadIdx.x % 32 == 0) row[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (int w = 0; w < warps; w++) sum += row[w];
  __syncthreads();
  return sum;
}

// Exclusive sums of n integers in shared memory, in place; returns the total. All threads of a block (x only) must call
// it. `scratch`: one integer per warp.
__device__ __forceinline__ int block_scan(int* values, int n, int* scratch) {
  const int each = (n + blockDim.x - 1) / blockDim.x;
  const int begin = threadIdx.x * each, end = begin + each < n ? begin + each : n;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  __syncthreads();
  int mine = 0;
  for (int i = begin; i < end; i++) mine += values[i];
  const int upto = warp_scan(mine);
  if (lane == 31) scratch[warp] = upto;
  __syncthreads();
  int total = 0, offset = upto - mine;
  for (int w = 0; w < warps; w++) {
    if (w < warp) offset += scratch[w];
    total += scratch[w];
  }
  for (int i = begin; i < end; i++) {
    const int value = values[i];
    values[i] = offset;
    offset += value;
  }
  __syncthreads();
  return total;
}

// Number of the n ascending values that are at most x: the index of the segment that contains x, given the ends of
// segments.
template <class T>
__device__ __forceinline__ i64 segment_of(const T* ends, i64 n, i64 x) {
  i64 low = 0, high = n;
  while (low < high) {
    const i64 middle = (low + high) / 2;
    if (ends[middle] <= x)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// A block's tokens: up to `tile` consecutive tokens of a routing group, whose sequences may be interleaved in memory.
struct GroupTile {
  i64 group, first;
  u32 begin, end, sequences, length;
  __device__ __forceinline__ GroupTile(i64 block, i64 tokens, i64 group_size, i64 num_sequences, i64 sequence_length,
                                       i64 tile) {
    const i64 tiles = (group_size + tile - 1) / tile;
    group = block / tiles, first = group * group_size;
    const i64 size = first < tokens ? at_most(group_size, tokens - first) : 0;
    begin = u32(at_most(block % tiles * tile, size)), end = u32(at_most(i64(begin) + tile, size));
    sequences = u32(num_sequences), length = u32(sequence_length);
  }
  // Memory position of the group's token s. Division is faster in 32 bits.
  __device__ __forceinline__ i64 token(u32 s) const {
    const u32 u = u32(first) + s;
    return sequences > 1 ? i64(u % length) * sequences + u / length : i64(u);
  }
};

// Number of kept rows. The rows after them belong to dropped assignments.
__device__ __forceinline__ i64 rows_kept(const i64* limit, i64 rows) { return limit ? at_most(*limit, rows) : rows; }

// This thread's row, in kernels in which the threads of one threadIdx.y process a row.
__device__ __forceinline__ i64 own_row() { return i64(blockIdx.x) * blockDim.y + threadIdx.y; }

template <int N, class T>
__device__ __forceinline__ void clear_row(T* out, i64 width) {
  const float zeros[N] = {};
  for (i64 v = threadIdx.x; v < width / N; v += blockDim.x) store<N>(out + v * N, zeros);
}

}  // namespace fmoe

// The integers of a dispatch: stable counting sort by expert, capacity, and the order of received rows. None depends on
// the order of threads: atomics only count, and ranks come from positions.
//
// Shape letters: T tokens, K choices, N = T * K assignments, E experts, G routing groups, B tiles of assignments, S
// segments of received rows, R received rows.
#include "common.cuh"

namespace fmoe {
// The bin of an assignment: its expert, or the last bin for dropped assignments.
__device__ __forceinline__ int bin_of(i64 expert, int experts) {
  return u64(expert) < u64(experts) ? int(expert) : experts;
}

// Counts 32 items of a warp in the order of lanes; each item has a bin, or none (below 0). `counts` is in shared memory
// and belongs to this warp. Returns the number of earlier items in the item's bin.
__device__ __forceinline__ int count_in_order(int* counts, int bin) {
  const int lane = threadIdx.x % 32;
  const u32 same = __match_any_sync(FULL, bin);
  const u32 before = same & ((1u << lane) - 1);
  const int rank = bin < 0 ? 0 : counts[bin] + __popc(before);
  __syncwarp();
  if (bin >= 0 && !before) counts[bin] += __popc(same);
  __syncwarp();
  return rank;
}

// Number of the n items, a multiple of 32, that each of the warps processes.
__device__ __forceinline__ i64 span_of(i64 n, int warps) { return (n + warps * 32 - 1) / (warps * 32) * 32; }

// tile_count [E + 1, B]: assignments of each tile, by bin.
__global__ void __launch_bounds__(256) count_tiles(const i64* __restrict__ expert_N, i64 assignments, i64 num_experts,
                                                   i64 tile, int* __restrict__ tile_count) {
  const int experts = int(num_experts);
  int* count = reinterpret_cast<int*>(shared_memory());
  for (int e = threadIdx.x; e <= experts; e += blockDim.x) count[e] = 0;
  __syncthreads();
  const i64 begin = blockIdx.x * tile, end = at_most(begin + tile, assignments);
  for (i64 i = begin + threadIdx.x; i < end; i += blockDim.x) atomicAdd(&count[bin_of(expert_N[i], experts)], 1);
  __syncthreads();
  for (int e = threadIdx.x; e <= experts; e += blockDim.x) tile_count[i64(e) * gridDim.x + blockIdx.x] = count[e];
}

// One block per bin: replaces the counts, in place, by sums over earlier tiles, and writes the totals.
__global__ void __launch_bounds__(256) scan_tiles(int* __restrict__ tile_count, i64 tiles, int* __restrict__ total_E1) {
  int* scratch = reinterpret_cast<int*>(shared_memory());
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int* count = tile_count + blockIdx.x * tiles;
  int carry = 0;
  for (i64 first = 0; first < tiles; first += blockDim.x) {
    const i64 i = first + threadIdx.x;
    const int mine = i < tiles ? count[i] : 0;
    const int upto = warp_scan(mine);
    if (lane == 31) scratch[warp] = upto;
    __syncthreads();
    int offset = carry + upto - mine;
    for (int w = 0; w < warps; w++) {
      if (w < warp) offset += scratch[w];
      carry += scratch[w];
    }
    if (i < tiles) count[i] = offset;
    __syncthreads();
  }
  if (threadIdx.x == 0) total_E1[blockIdx.x] = carry;
}

// The plan: assignments by (expert, position), dropped ones last. One block per tile. With a single tile, the counts
// may be null.
__global__ void __launch_bounds__(256)
    place(const i64* __restrict__ expert_N, i64 assignments, i64 num_experts, i64 tile,
          const int* __restrict__ tile_count, const int* __restrict__ total_E1, i64* __restrict__ order_N,
          i64* __restrict__ place_N, u8* __restrict__ kept_N, i64* __restrict__ count_E, int* __restrict__ end_E,
          i64* __restrict__ num_kept) {
  const int experts = int(num_experts), bins = experts + 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int* counts = reinterpret_cast<int*>(shared_memory());  // [warps, bins]
  int* begin_of = counts + warps * bins;
  int* scratch = begin_of + bins;
  int* mine = counts + warp * bins;
  for (int i = threadIdx.x; i < warps * bins; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  const i64 first = blockIdx.x * tile, last = at_most(first + tile, assignments);
  const i64 span = span_of(tile, warps), begin = first + warp * span, end = at_most(begin + span, last);
  for (i64 i = begin; i < end; i += 32) {
    const i64 n = i + lane;
    count_in_order(mine, n < end ? bin_of(expert_N[n], experts) : -1);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < bins; b += blockDim.x) {
    int total = 0;
    if (total_E1) {
      total = total_E1[b];
    } else {
      for (int w = 0; w < warps; w++) total += counts[w * bins + b];
    }
    begin_of[b] = total;
  }
  block_scan(begin_of, bins, scratch);
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
      count_E[e] = begin_of[e + 1] - begin_of[e];
      if (end_E) end_E[e] = begin_of[e + 1];
    }
    if (num_kept && threadIdx.x == 0) *num_kept = begin_of[experts];
  }
  // Position of each warp's next assignment of a bin.
  for (int b = threadIdx.x; b < bins; b += blockDim.x) {
    int next = begin_of[b] + (tile_count ? tile_count[i64(b) * gridDim.x + blockIdx.x] : 0);
    for (int w = 0; w < warps; w++) {
      const int count = counts[w * bins + b];
      counts[w * bins + b] = next;
      next += count;
    }
  }
  __syncthreads();
  for (i64 i = begin; i < end; i += 32) {
    const i64 n = i + lane;
    const int bin = n < end ? bin_of(expert_N[n], experts) : -1;
    const int at = count_in_order(mine, bin);
    if (bin < 0) continue;
    order_N[at] = n;
    place_N[n] = at;
    if (kept_N) kept_N[n] = bin < experts;
  }
}

// -1 for assignments over their expert's capacity, one block per routing group: first choices of all its tokens in
// order, then second ones, ...
__global__ void __launch_bounds__(256)
    drop_over_capacity(const i64* __restrict__ expert_TK, const u8* __restrict__ mask_T, i64 tokens, i64 top_k,
                       i64 num_experts, i64 group_size, i64 sequences, i64 sequence_length, double factor,
                       i64* __restrict__ kept_TK, i64* __restrict__ load_GE) {
  const int experts = int(num_experts);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int* counts = reinterpret_cast<int*>(shared_memory());  // [warps, experts]
  int* valid_of = counts + warps * experts;
  int* mine = counts + warp * experts;
  for (int i = threadIdx.x; i < warps * experts; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  const i64 first = blockIdx.x * group_size, size = first < tokens ? at_most(group_size, tokens - first) : 0;
  // Index in memory of the group's token s; sequences may be interleaved. Everything but the index fits into 32 bits,
  // in which division is faster.
  auto token = [&](u32 s) {
    const u32 u = u32(first) + s, length = u32(sequence_length);
    return sequences > 1 ? u % length * sequences + u / length : i64(u);
  };
  const i64 items = size * top_k, span = span_of(items, warps), begin = warp * span, end = at_most(begin + span, items);
  auto assignment = [&](i64 i) { return token(u32(i) % u32(size)) * top_k + u32(i) / u32(size); };
  for (i64 i = begin; i < end; i += 32) {
    const int bin = i + lane < end ? bin_of(expert_TK[assignment(i + lane)], experts) : -1;
    count_in_order(mine, bin < experts ? bin : -1);
  }
  int valid = 0;
  if (mask_T)
    for (i64 s = threadIdx.x; s < size; s += blockDim.x) valid += mask_T[token(u32(s))] != 0;
  valid = warp_sum(valid);
  if (lane == 0) valid_of[warp] = valid;
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    int before = 0;
    for (int w = 0; w < warps; w++) {
      const int count = counts[w * experts + e];
      counts[w * experts + e] = before;
      before += count;
    }
    if (load_GE && size) load_GE[i64(blockIdx.x) * experts + e] = before;
  }
  __syncthreads();
  if (!kept_TK) return;
  i64 limit = items;
  if (factor > 0) {
    i64 routed = size;
    if (mask_T) {
      routed = 0;
      for (int w = 0; w < warps; w++) routed += valid_of[w];
    }
    // The same operations as in fmoe.gates.capacity.
    limit = i64(ceil(factor * double(routed * top_k) / double(experts) - 1e-9));
    if (limit < 1) limit = 1;
  }
  for (i64 i = begin; i < end; i += 32) {
    const bool is_item = i + lane < end;
    const i64 n = is_item ? assignment(i + lane) : 0;
    int bin = is_item ? bin_of(expert_TK[n], experts) : -1;
    if (bin == experts) bin = -1;
    const int before = count_in_order(mine, bin);
    if (is_item) kept_TK[n] = bin >= 0 && before < limit ? bin : -1;
  }
}

// Rows arrive in segments of receive_S rows, and are needed in the order order_S of segments: writes where each needed
// row is, and where each received row belongs.
__global__ void __launch_bounds__(256)
    segment_order(const i64* __restrict__ receive_S, const i64* __restrict__ order_S, i64 num_segments, i64 rows,
                  i64* __restrict__ order_R, i64* __restrict__ inverse_R) {
  const int segments = int(num_segments);
  int* arrived = reinterpret_cast<int*>(shared_memory());  // start of each segment
  int* wanted = arrived + segments + 1;                    // the same in the needed order
  int* wanted_of = wanted + segments + 1;                  // the same by segment
  int* scratch = wanted_of + segments;
  for (int s = threadIdx.x; s < segments; s += blockDim.x) {
    arrived[s] = int(receive_S[s]);
    wanted[s] = int(receive_S[order_S[s]]);
  }
  if (threadIdx.x == 0) arrived[segments] = wanted[segments] = 0;
  block_scan(arrived, segments + 1, scratch);
  block_scan(wanted, segments + 1, scratch);
  for (int s = threadIdx.x; s < segments; s += blockDim.x) wanted_of[order_S[s]] = wanted[s];
  __syncthreads();
  for (i64 r = i64(blockIdx.x) * blockDim.x + threadIdx.x; r < rows; r += i64(gridDim.x) * blockDim.x) {
    const i64 w = segment_of(wanted + 1, segments, r);
    order_R[r] = w < segments ? r - wanted[w] + arrived[order_S[w]] : r;
    const i64 s = segment_of(arrived + 1, segments, r);
    inverse_R[r] = s < segments ? r - arrived[s] + wanted_of[s] : r;
  }
}

}  // namespace fmoe

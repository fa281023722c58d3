// The integer work of a dispatch: stable counting sort by expert, capacity, the order of received rows; and a router's
// losses and statistics. No result depends on the order of threads: atomics only count integers, and ranks follow from
// positions.
//
// Shape letters: T tokens, K choices, N = T * K assignments, E experts, G routing groups, B tiles, C choices that are
// counted separately (K with a capacity, else 1), S segments of received rows, R received rows.
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

// Number of items per warp if n items are divided among the warps, a multiple of 32.
__device__ __forceinline__ i64 span_of(i64 n, int warps) { return (n + warps * 32 - 1) / (warps * 32) * 32; }

// tile_count [B, E + 1]: assignments of each tile by bin.
__global__ void __launch_bounds__(256) count_tiles(const i64* __restrict__ expert_N, i64 assignments, i64 num_experts,
                                                   i64 tile, int* __restrict__ tile_count) {
  const int experts = int(num_experts);
  int* count = reinterpret_cast<int*>(shared_memory());
  for (int e = threadIdx.x; e <= experts; e += blockDim.x) count[e] = 0;
  __syncthreads();
  const i64 begin = blockIdx.x * tile, end = at_most(begin + tile, assignments);
  for (i64 i = begin + threadIdx.x; i < end; i += blockDim.x) atomicAdd(&count[bin_of(expert_N[i], experts)], 1);
  __syncthreads();
  for (int e = threadIdx.x; e <= experts; e += blockDim.x) tile_count[i64(blockIdx.x) * (experts + 1) + e] = count[e];
}

// Writes the plan: assignments sorted by (expert, position), dropped ones last. A block processes a tile, and sums the
// counts of all tiles itself, which saves a launch. With a single tile, the counts may be null.
__global__ void __launch_bounds__(256)
    place(const i64* __restrict__ expert_N, i64 assignments, i64 num_experts, i64 tile,
          const int* __restrict__ tile_count, i64* __restrict__ perm_N, i64* __restrict__ inverse_N,
          u8* __restrict__ kept_N, i64* __restrict__ count_E, int* __restrict__ end_E, i64* __restrict__ num_kept) {
  const int experts = int(num_experts), bins = experts + 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int* counts = reinterpret_cast<int*>(shared_memory());  // [warps, bins]
  int* begin_of = counts + warps * bins;  // first row of each bin, over all tiles
  int* before = begin_of + bins;          // assignments of earlier tiles
  int* scratch = before + bins;
  int* mine = counts + warp * bins;
  for (int i = threadIdx.x; i < (warps + 2) * bins; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  if (tile_count) {
    for (int b = lane; b < bins; b += 32) {
      int all = 0, earlier = 0;
#pragma unroll 4
      for (u32 i = warp; i < gridDim.x; i += warps) {
        const int count = tile_count[i64(i) * bins + b];
        all += count;
        earlier += i < blockIdx.x ? count : 0;
      }
      atomicAdd(&begin_of[b], all);
      atomicAdd(&before[b], earlier);
    }
  }
  const i64 first = blockIdx.x * tile, last = at_most(first + tile, assignments);
  const i64 span = span_of(tile, warps), begin = first + warp * span, end = at_most(begin + span, last);
  for (i64 i = begin; i < end; i += 32) {
    const i64 n = i + lane;
    count_in_order(mine, n < end ? bin_of(expert_N[n], experts) : -1);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < bins && !tile_count; b += blockDim.x)
    for (int w = 0; w < warps; w++) begin_of[b] += counts[w * bins + b];
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
    int next = begin_of[b] + before[b];
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
    perm_N[at] = n;
    inverse_N[n] = at;
    if (kept_N) kept_N[n] = bin < experts;
  }
}

// Counts like `route`: the choices [B, K, E] of each tile of a routing group's tokens, and the tile's routed tokens
// (the last of the three numbers of sum_B3). There is one block per tile and choice.
__global__ void __launch_bounds__(256)
    count_choices(const i64* __restrict__ expert_TK, const u8* __restrict__ mask_T, i64 tokens, i64 top_k,
                  i64 num_experts, i64 group_size, i64 sequences, i64 sequence_length, i64 tile,
                  int* __restrict__ count_BKE, float* __restrict__ sum_B3) {
  const int experts = int(num_experts);
  int* count = reinterpret_cast<int*>(shared_memory());
  int* routed = count + experts;
  for (int e = threadIdx.x; e <= experts; e += blockDim.x) count[e] = 0;
  __syncthreads();
  const GroupTile own(blockIdx.x, tokens, group_size, sequences, sequence_length, tile);
  for (u32 s = own.begin + threadIdx.x; s < own.end; s += blockDim.x) {
    const i64 t = own.token(s);
    const int bin = bin_of(expert_TK[t * top_k + blockIdx.y], experts);
    if (bin < experts) atomicAdd(&count[bin], 1);
    if (!mask_T || mask_T[t]) atomicAdd(routed, 1);
  }
  __syncthreads();
  int* out = count_BKE + (i64(blockIdx.x) * top_k + blockIdx.y) * experts;
  for (int e = threadIdx.x; e < experts; e += blockDim.x) out[e] = count[e];
  if (blockIdx.y == 0 && threadIdx.x < 3) sum_B3[i64(blockIdx.x) * 3 + threadIdx.x] = threadIdx.x == 2 ? *routed : 0;
}

// Sum over all threads of a block (x and y) in a fixed order, returned to all of them. `shared`: one number per warp.
template <class T>
__device__ __forceinline__ T sum_of_block(T x, T* shared) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, warps = blockDim.x * blockDim.y / 32;
  x = warp_sum(x);
  __syncthreads();
  if (thread % 32 == 0) shared[thread / 32] = x;
  __syncthreads();
  T sum = 0;
  for (int w = 0; w < warps; w++) sum += shared[w];
  return sum;
}

constexpr int QUEUE_WARPS = 16;

// Adds up the counts and sums of all tiles (from `route` or `count_choices`). A block of 32 x 16 threads processes 32
// experts of a group. It writes limit_G, the capacity, and zeros to tile_count. With a capacity, `count_BCE` becomes
// each tile's first position in the experts' queues, where the first choices of all tokens precede the second choices.
// With sum_BE, it writes fraction_GE, each expert's share of the choices, and the last block to finish adds up all
// groups: balance and z are the losses; stats, [E + 5], has the kept assignments by expert, the number of dropped ones,
// and sums over tokens of entropy, 1, the balance loss and the z loss.
__global__ void __launch_bounds__(32 * QUEUE_WARPS, 1)
    queue(int* count_BCE, const float* __restrict__ sum_BE, const float* __restrict__ sum_B3, i64 num_groups, i64 tiles,
          i64 choices, i64 num_experts, i64 top_k, double factor, i64* __restrict__ limit_G,
          int* __restrict__ tile_count, i64 num_tile_counts, float* __restrict__ fraction_GE, volatile i64* kept_GE,
          volatile double* part_GX, int* ticket, float* __restrict__ stats, float* __restrict__ balance,
          float* __restrict__ z) {
  const int experts = int(num_experts), lane = threadIdx.x, warp = threadIdx.y, thread = warp * 32 + lane;
  constexpr int THREADS = 32 * QUEUE_WARPS;
  double* numbers = reinterpret_cast<double*>(shared_memory());  // [QUEUE_WARPS, 32]
  int* integers = reinterpret_cast<int*>(numbers + THREADS);     // [QUEUE_WARPS, 32]
  const i64 group = blockIdx.x, chunk = blockIdx.y, chunks = gridDim.y, first = group * tiles;
  const int e = int(chunk) * 32 + lane;
  const bool is_expert = e < experts;
  int routed = 0;
  for (i64 b = thread; b < tiles; b += THREADS) routed += int(sum_B3[(first + b) * 3 + 2]);
  routed = sum_of_block(routed, integers);
  i64 limit = 0x7fffffff;
  if (factor > 0) {
    // The same operations as in fmoe.gates.capacity.
    limit = i64(ceil(factor * double(routed * top_k) / double(experts) - 1e-9));
    if (limit < 1) limit = 1;
  }
  const i64 span = (tiles + QUEUE_WARPS - 1) / QUEUE_WARPS, begin = warp * span, end = at_most(begin + span, tiles);
  int total = 0;
  for (i64 c = 0; c < choices; c++) {
    int mine = 0;
    for (i64 b = begin; b < end && is_expert; b++) mine += count_BCE[((first + b) * choices + c) * experts + e];
    __syncthreads();
    integers[thread] = mine;
    __syncthreads();
    int next = total;
    for (int w = 0; w < QUEUE_WARPS; w++) {
      const int count = integers[w * 32 + lane];
      if (w < warp) next += count;
      total += count;
    }
    if (factor <= 0) continue;
    for (i64 b = begin; b < end && is_expert; b++) {
      int* at = count_BCE + ((first + b) * choices + c) * experts + e;
      const int count = *at;
      *at = next;
      next += count;
    }
  }
  if (limit_G && chunk == 0 && thread == 0) limit_G[group] = limit;
  const i64 block = group * chunks + chunk, blocks = i64(gridDim.x) * chunks;
  for (i64 i = block * THREADS + thread; i < num_tile_counts; i += blocks * THREADS) tile_count[i] = 0;
  if (!stats) return;
  double score = 0;
  for (i64 b = begin; b < end && is_expert; b++) score += sum_BE[(first + b) * experts + e];
  numbers[thread] = score;
  __syncthreads();
  if (warp == 0) {
    score = 0;
    for (int w = 0; w < QUEUE_WARPS; w++) score += numbers[w * 32 + lane];
    const double all = double(routed) * double(top_k), fraction = double(total) / (all < 1 ? 1.0 : all);
    const i64 kept = at_most(total, limit);
    if (is_expert) {
      fraction_GE[group * experts + e] = float(fraction);
      kept_GE[group * experts + e] = kept;
    }
    const double part = warp_sum(is_expert ? fraction * score : 0.0);
    const int dropped = warp_sum(is_expert ? int(total - kept) : 0);
    if (lane == 0) {
      volatile double* parts = part_GX + block * 2;
      parts[0] = part;
      parts[1] = dropped;
    }
    __threadfence();  // every lane's writes precede the ticket
    __syncwarp();
    if (lane == 0) integers[0] = atomicAdd(ticket, 1) == int(blocks) - 1;
  }
  __syncthreads();
  const bool is_last = integers[0];
  if (!is_last) return;
  __threadfence();
  for (int i = thread; i < experts; i += THREADS) {
    i64 kept = 0;
    for (i64 g = 0; g < num_groups; g++) kept += kept_GE[g * experts + i];
    stats[i] = float(kept);
  }
  double sums[5] = {};  // fraction * score, dropped, logsumexp^2, entropy, tokens
  for (i64 i = thread; i < blocks; i += THREADS) {
    sums[0] += part_GX[2 * i];
    sums[1] += part_GX[2 * i + 1];
  }
  for (i64 b = thread; b < num_groups * tiles; b += THREADS)
    for (int i = 0; i < 3; i++) sums[2 + i] += sum_B3[b * 3 + i];
#pragma unroll
  for (int i = 0; i < 5; i++) sums[i] = sum_of_block(sums[i], numbers);
  if (thread) return;
  const double tokens = sums[4], by = 1.0 / (tokens < 1 ? 1.0 : tokens);
  *balance = float(double(experts) * sums[0] * by), *z = float(sums[2] * by);
  float* rest = stats + experts;
  rest[0] = float(sums[1]), rest[1] = float(sums[3]), rest[2] = float(tokens);
  rest[3] = float(double(experts) * sums[0] * by * tokens), rest[4] = float(sums[2] * by * tokens);
}

// Replaces assignments over their expert's capacity by -1, given the positions from `queue`. There is a block per tile,
// and a warp takes one choice at a time. The counts of `count_tiles` for the result are added to `tile_count`.
__global__ void __launch_bounds__(256)
    drop_over_capacity(const i64* __restrict__ expert_TK, i64 tokens, i64 top_k, i64 num_experts, i64 group_size,
                       i64 sequences, i64 sequence_length, i64 tile, const int* __restrict__ queue_BKE,
                       const i64* __restrict__ limit_G, i64 plan_tile, i64* __restrict__ kept_TK,
                       int* __restrict__ tile_count) {
  const int experts = int(num_experts);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int* next = reinterpret_cast<int*>(shared_memory()) + warp * experts;
  const GroupTile own(blockIdx.x, tokens, group_size, sequences, sequence_length, tile);
  if (own.begin == own.end) return;
  const i64 limit = limit_G[own.group];
  for (i64 k = warp; k < top_k; k += warps) {
    const int* queue = queue_BKE + (blockIdx.x * top_k + k) * experts;
    __syncwarp();
    for (int e = lane; e < experts; e += 32) next[e] = queue[e];
    __syncwarp();
    for (u32 s = own.begin; s < own.end; s += 32) {
      const bool is_item = s + lane < own.end;
      const i64 n = is_item ? own.token(s + lane) * top_k + k : 0;
      int bin = is_item ? bin_of(expert_TK[n], experts) : -1;
      if (bin == experts) bin = -1;
      const int before = count_in_order(next, bin);
      const bool is_kept = bin >= 0 && before < limit;
      if (!is_item) continue;
      kept_TK[n] = is_kept ? bin : -1;
      if (tile_count) atomicAdd(&tile_count[n / plan_tile * (experts + 1) + (is_kept ? bin : experts)], 1);
    }
  }
}

// Rows are received in segments of receive_S rows, and needed in the order order_S of the segments. Writes the received
// index of each needed row, and the inverse permutation.
__global__ void __launch_bounds__(256)
    segment_order(const i64* __restrict__ receive_S, const i64* __restrict__ order_S, i64 num_segments, i64 rows,
                  i64* __restrict__ order_R, i64* __restrict__ inverse_R) {
  const int segments = int(num_segments);
  int* arrived = reinterpret_cast<int*>(shared_memory());  // start of each segment
  int* wanted = arrived + segments + 1;                    // starts in the needed order
  int* wanted_of = wanted + segments + 1;                  // the same starts, by received segment
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

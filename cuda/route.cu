// From a router's logits to scores, the K best experts, their weights and statistics, one warp per token.
//
// Shape letters: T tokens, E experts, K choices. A lane holds the experts e with e % 32 == lane.
#include "common.cuh"

namespace fmoe {
// Integer keys in the order of floats: NaN above all, as in torch.topk, and -0 equal to 0. No float has the key 0.
__device__ __forceinline__ u32 key_of(float x) {
  if (x != x) return FULL;
  const u32 bits = __float_as_uint(x + 0.0f);
  return bits ^ (bits >> 31 ? FULL : 0x80000000u);
}

__device__ __forceinline__ float of_key(u32 key) {
  return __uint_as_float(key == FULL ? 0x7fc00000u : key ^ (key >> 31 ? 0x80000000u : FULL));
}

constexpr u32 KEY_OF_MINUS_INFINITY = 0x007fffffu;
#define MINUS_INFINITY __uint_as_float(0xff800000u)

// A token's values, one per expert: in registers for up to 32 * I experts, in shared memory for more (I = 0).
template <int I>
struct Row {
  u32 values[I];
  __device__ __forceinline__ Row(u32*, int) {}
  __device__ __forceinline__ int size() const { return I; }
  __device__ __forceinline__ u32& operator[](int i) { return values[i]; }
};

template <>
struct Row<0> {
  u32* values;
  int items;
  __device__ __forceinline__ Row(u32* memory, int experts) : values(memory), items((experts + 31) / 32) {}
  __device__ __forceinline__ int size() const { return items; }
  // Only this lane reads and writes its values.
  __device__ __forceinline__ u32& operator[](int i) { return values[i * 32 + threadIdx.x % 32]; }
};

struct Ranked {
  u32 key;
  int index;
};

// Larger key first, then lower index.
__device__ __forceinline__ bool is_after(u32 key, int index, Ranked last) {
  return key < last.key || (key == last.key && index > last.index);
}

// The best of the lanes' best experts; the index is out of range if no lane has one.
__device__ __forceinline__ Ranked best_of_warp(Ranked mine) {
  const u32 key = __reduce_max_sync(FULL, mine.key);
  const int index = __reduce_min_sync(FULL, mine.key == key && key ? mine.index : 0x7fffffff);
  return {key, index};
}

// The best expert of begin..end that comes after `last`.
template <int I>
__device__ __forceinline__ Ranked next_best(Row<I>& keys, int begin, int end, Ranked last) {
  Ranked mine{0, 0};
#pragma unroll(I ? I : 1)
  for (int i = 0; i < keys.size(); i++) {
    const int e = i * 32 + threadIdx.x % 32;
    if (e >= begin && e < end && keys[i] > mine.key && is_after(keys[i], e, last)) mine = {keys[i], e};
  }
  return best_of_warp(mine);
}

// Sets the keys of experts outside the best `kept` of `groups` groups to the key of -inf. `group_keys`: one per group,
// in shared memory.
template <int I>
__device__ __forceinline__ void limit_to_groups(Row<I>& keys, int experts, int groups, int kept, int best_of,
                                                u32* group_keys) {
  const int lane = threadIdx.x % 32, size = experts / groups;
  __syncwarp();  // the previous token's values have been read
#pragma unroll 1
  for (int g = 0; g < groups; g++) {
    Ranked last{FULL, -1};
    float sum = 0;
#pragma unroll 1
    for (int n = 0; n < best_of && n < size; n++) {
      last = next_best(keys, g * size, (g + 1) * size, last);
      sum = n ? sum + of_key(last.key) : of_key(last.key);
    }
    if (lane == 0) group_keys[g] = key_of(sum);
  }
  __syncwarp();
  Ranked last{FULL, -1};
#pragma unroll 1
  for (int n = 0; n < kept; n++) {
    Ranked mine{0, 0};
#pragma unroll 1
    for (int g = lane; g < groups; g += 32)
      if (group_keys[g] > mine.key && is_after(group_keys[g], g, last)) mine = {group_keys[g], g};
    last = best_of_warp(mine);
  }
#pragma unroll(I ? I : 1)
  for (int i = 0; i < keys.size(); i++) {
    const int e = i * 32 + lane;
    if (e < experts && is_after(group_keys[e / size], e / size, last)) keys[i] = KEY_OF_MINUS_INFINITY;
  }
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The value subtracted from logits before exp, so that it does not overflow: their maximum, or 0 if that is infinite.
__device__ __forceinline__ float shift_of(float largest) { return isinf(largest) ? 0.0f : largest; }

// Normalization of scores: a softmax is exp(x - shift) / sum, a normalized sigmoid is sigmoid(x) / sum.
struct Normal {
  float shift, sum;
};

// Normalization over the chosen logits.
template <class T, class Index>
__device__ __forceinline__ Normal normal_of(const T* logits, const Index* chosen, int top_k, bool is_sigmoid) {
  const int lane = threadIdx.x % 32;
  Normal normal{0, 0};
  if (!is_sigmoid) {
    float largest = MINUS_INFINITY;
#pragma unroll 1
    for (int k = lane; k < top_k; k += 32)
      if (chosen[k] >= 0) largest = fmaxf(largest, to_float(logits[chosen[k]]));
    normal.shift = warp_max(largest);
  }
#pragma unroll 1
  for (int k = lane; k < top_k; k += 32) {
    if (chosen[k] < 0) continue;
    const float x = to_float(logits[chosen[k]]);
    normal.sum += is_sigmoid ? sigmoid(x) : expf(x - normal.shift);
  }
  normal.sum = warp_sum(normal.sum);
  return normal;
}

// A block processes a tile of a routing group's tokens; each warp takes one token at a time. `count_BCE`, `sum_BE` and
// `sum_B3` are given together or not at all: the tile's choices by expert (and by choice, if `by_choice`), its sums of
// probabilities, and its sums of logsumexp^2, entropy and 1, all over the tokens that are routed. `queue` in plan.cu
// reads them.
template <class T, int I>
__global__ void __launch_bounds__(256, 2)
    route(const T* __restrict__ logits_TE, const float* __restrict__ bias_E, const u8* __restrict__ mask_T, i64 tokens,
          i64 num_experts, i64 num_choices, i64 is_sigmoid, i64 by_logits, i64 normalize, double scale, i64 num_groups,
          i64 kept_groups, i64 best_of, i64 group_size, i64 sequences, i64 sequence_length, i64 tile, i64 by_choice,
          i64* __restrict__ expert_TK, float* __restrict__ weight_TK, float* __restrict__ score_TE,
          float* __restrict__ logsumexp_T, float* __restrict__ entropy_T, int* __restrict__ count_BCE,
          float* __restrict__ sum_BE, float* __restrict__ sum_B3, int* __restrict__ ticket) {
  const int experts = int(num_experts), top_k = int(num_choices), groups = int(num_groups);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int bins = count_BCE ? (by_choice ? top_k : 1) * experts : 0, summed = count_BCE ? experts : 0;
  const int each = top_k + groups + 3 + summed + (I == 0 ? experts : 0);  // words of shared memory of a warp
  int* histogram = reinterpret_cast<int*>(shared_memory());
  int* chosen = histogram + bins + warp * each;
  u32* group_keys = reinterpret_cast<u32*>(chosen + top_k);
  float* scalars = reinterpret_cast<float*>(group_keys + groups);
  float* sums = scalars + 3;
  for (int i = threadIdx.x; i < bins; i += blockDim.x) histogram[i] = 0;
  for (int e = lane; e < summed; e += 32) sums[e] = 0;  // each lane reads and writes only its own experts'
  if (ticket && blockIdx.x == 0 && threadIdx.x == 0) *ticket = 0;
  __syncthreads();
  float squares = 0, entropies = 0, routed = 0;
  const GroupTile own(blockIdx.x, tokens, group_size, sequences, sequence_length, tile);
  for (u32 s = own.begin + warp; s < own.end; s += warps) {
    const i64 t = own.token(s);
    const T* logits = logits_TE + t * experts;
    const bool is_routed = !mask_T || mask_T[t];
    Row<I> row(reinterpret_cast<u32*>(sums + summed), experts);
    float largest = MINUS_INFINITY;
#pragma unroll(I ? I : 1)
    for (int i = 0; i < row.size(); i++) {
      const int e = i * 32 + lane;
      if (e >= experts) {
        if (I) row[i] = 0;
        continue;
      }
      const float x = to_float(logits[e]);
      row[i] = __float_as_uint(x);
      largest = fmaxf(largest, x);
    }
    float logsumexp = 0, scores = 0, entropy = 0;
    const bool has_entropy = entropy_T || count_BCE;
    if (!is_sigmoid || logsumexp_T) {
      const float shift = shift_of(warp_max(largest));
      float sum = 0;
#pragma unroll(I ? I : 1)
      for (int i = 0; i < row.size(); i++)
        if (i * 32 + lane < experts) sum += expf(__uint_as_float(row[i]) - shift);
      logsumexp = shift + logf(warp_sum(sum));
      if (logsumexp_T && lane == 0) logsumexp_T[t] = logsumexp;
    }
    if (is_sigmoid && has_entropy) {
#pragma unroll(I ? I : 1)
      for (int i = 0; i < row.size(); i++)
        if (i * 32 + lane < experts) scores += sigmoid(__uint_as_float(row[i]));
      scores = fmaxf(warp_sum(scores), 1e-20f);
    }
#pragma unroll(I ? I : 1)
    for (int i = 0; i < row.size(); i++) {
      const int e = i * 32 + lane;
      if (e >= experts) continue;
      const float x = __uint_as_float(row[i]);
      const float score = is_sigmoid ? sigmoid(x) : expf(x - logsumexp);
      if (score_TE) score_TE[t * experts + e] = score;
      if (has_entropy) {
        const float p = is_sigmoid ? score / scores : score;
        entropy += p == 0 ? 0.0f : p * (is_sigmoid ? -logf(p) : logsumexp - x);
        if (count_BCE && is_routed) sums[e] += p;
      }
      row[i] = key_of((by_logits ? x : score) + (bias_E ? bias_E[e] : 0.0f));
    }
    if (has_entropy) {
      entropy = warp_sum(entropy);
      if (entropy_T && lane == 0) entropy_T[t] = entropy;
    }
    if (is_routed) squares += logsumexp * logsumexp, entropies += entropy, routed += 1;
    if (groups) limit_to_groups(row, experts, groups, int(kept_groups), int(best_of), group_keys);
    __syncwarp();  // the previous token's choices have been read
    Ranked best{FULL, -1};
#pragma unroll 1
    for (int k = 0; k < top_k; k++) {
      best = next_best(row, 0, experts, best);
      if (lane == 0) chosen[k] = best.index;
    }
    __syncwarp();
    Normal normal{logsumexp, 1.0f};
    if (normalize) normal = normal_of(logits, chosen, top_k, is_sigmoid);
    if (is_sigmoid) normal.sum = fmaxf(normal.sum, 1e-20f);
#pragma unroll 1
    for (int k = lane; k < top_k; k += 32) {
      const int e = chosen[k];
      const float x = to_float(logits[e]);
      const float score = is_sigmoid ? sigmoid(x) : expf(x - normal.shift);
      expert_TK[t * top_k + k] = is_routed ? e : -1;
      weight_TK[t * top_k + k] = score / normal.sum * float(scale);
      if (is_routed && count_BCE) atomicAdd(&histogram[(by_choice ? k : 0) * experts + e], 1);
    }
  }
  if (!count_BCE) return;
  if (lane == 0) scalars[0] = squares, scalars[1] = entropies, scalars[2] = routed;
  __syncthreads();
  for (int i = threadIdx.x; i < bins; i += blockDim.x) count_BCE[i64(blockIdx.x) * bins + i] = histogram[i];
  const float* first = reinterpret_cast<const float*>(histogram + bins + top_k + groups);  // of the first warp
  for (int i = threadIdx.x; i < experts + 3; i += blockDim.x) {
    float sum = 0;
    for (int w = 0; w < warps; w++) sum += first[w * each + i];
    if (i < 3)
      sum_B3[i64(blockIdx.x) * 3 + i] = sum;
    else
      sum_BE[i64(blockIdx.x) * experts + i - 3] = sum;
  }
}

// The gradient of the logits, given those of weights, scores, logsumexp, and the two losses of `queue`.
template <class T, class Out>
__global__ void __launch_bounds__(256)
    route_backward(const T* __restrict__ logits_TE, const i64* __restrict__ expert_TK,
                   const float* __restrict__ logsumexp_T, const float* __restrict__ d_weight_TK,
                   const float* __restrict__ d_score_TE, const float* __restrict__ d_logsumexp_T,
                   const u8* __restrict__ mask_T, const float* __restrict__ d_balance, const float* __restrict__ d_z,
                   const float* __restrict__ fraction_GE, const float* __restrict__ routed, i64 tokens, i64 num_experts,
                   i64 num_choices, i64 is_sigmoid, i64 normalize, double scale, i64 group_size, i64 sequences,
                   i64 sequence_length, Out* __restrict__ d_logits_TE) {
  const int experts = int(num_experts), top_k = int(num_choices);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  float* row = reinterpret_cast<float*>(shared_memory()) + warp * experts;
  const i64 t = i64(blockIdx.x) * warps + warp;
  if (t >= tokens) return;
  const T* logits = logits_TE + t * experts;
  const i64* chosen = expert_TK + t * top_k;
  const float* d_weight = d_weight_TK + t * top_k;
  // `row` holds the gradients that come from the weights: of the scores, or, if the softmax is over the chosen experts,
  // of the logits.
  const bool is_logits = !is_sigmoid && normalize;
#pragma unroll 1
  for (int e = lane; e < experts; e += 32) row[e] = 0;
  __syncwarp();
  if (d_weight_TK) {
    Normal normal{0, 1};
    float mean = 0;  // weighted sum of the gradients
    bool is_normal = normalize;
    if (normalize) {
      normal = normal_of(logits, chosen, top_k, is_sigmoid);
      if (is_sigmoid && normal.sum < 1e-20f) normal.sum = 1e-20f, is_normal = false;
      if (is_normal) {
#pragma unroll 1
        for (int k = lane; k < top_k; k += 32) {
          if (chosen[k] < 0) continue;
          const float x = to_float(logits[chosen[k]]);
          mean += (is_sigmoid ? sigmoid(x) : expf(x - normal.shift)) / normal.sum * d_weight[k];
        }
        mean = warp_sum(mean);
      }
    }
#pragma unroll 1
    for (int k = lane; k < top_k; k += 32) {
      if (chosen[k] < 0) continue;
      float d = (d_weight[k] - mean) / normal.sum * float(scale);
      if (is_logits) d *= expf(to_float(logits[chosen[k]]) - normal.shift);
      row[chosen[k]] = d;
    }
    __syncwarp();
  }
  const float logsumexp = logsumexp_T ? logsumexp_T[t] : 0.0f;
  float d_logsumexp = d_logsumexp_T ? d_logsumexp_T[t] : 0.0f;
  const float* d_score = d_score_TE ? d_score_TE + t * experts : nullptr;
  // balance = E / tokens * sum over groups and experts of fraction * sum of scores; z = mean of logsumexp^2.
  const float* fraction = nullptr;
  float d_sum = 0;
  if ((d_balance || d_z) && (!mask_T || mask_T[t])) {
    const float share = 1.0f / fmaxf(*routed, 1.0f);
    if (d_balance) {
      const u32 u = sequences > 1 ? u32(t) % u32(sequences) * u32(sequence_length) + u32(t) / u32(sequences) : u32(t);
      fraction = fraction_GE + i64(u / u32(group_size)) * experts;
      d_sum = *d_balance * float(experts) * share;
    }
    if (d_z) d_logsumexp += *d_z * 2.0f * logsumexp * share;
  }
  auto d_of = [&](int e) {
    return (is_logits ? 0.0f : row[e]) + (d_score ? d_score[e] : 0.0f) + (fraction ? d_sum * fraction[e] : 0.0f);
  };
  float dot = 0;
  if (!is_sigmoid && (d_score || fraction || !is_logits)) {
#pragma unroll 1
    for (int e = lane; e < experts; e += 32) dot += expf(to_float(logits[e]) - logsumexp) * d_of(e);
    dot = warp_sum(dot);
  }
  const bool has_p = !is_sigmoid || d_logsumexp_T || d_z;
#pragma unroll 1
  for (int e = lane; e < experts; e += 32) {
    const float x = to_float(logits[e]);
    const float p = has_p ? expf(x - logsumexp) : 0.0f;
    float sum = p * d_logsumexp + (is_logits ? row[e] : 0.0f);
    if (is_sigmoid) {
      const float s = sigmoid(x);
      sum += d_of(e) * s * (1.0f - s);
    } else {
      sum += p * (d_of(e) - dot);
    }
    put(d_logits_TE + t * experts + e, sum);
  }
}

}  // namespace fmoe

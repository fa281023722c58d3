// GEMMs of few rows: a block of b, repacked into panels of [k, COLUMNS], stays in the L2 cache while tiles of a, [k, up
// to ROWS], are processed.
#include "scalars.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fmoe {
namespace FMOE_JOIN(isa_, FMOE_ISA) {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 6;
#else
constexpr int LANES = 4, ROWS = 6;
#endif
constexpr int COLUMNS = 2 * LANES;
typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef float Loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Lanes __attribute__((vector_size(LANES * 4)));

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
INLINE Vector load_vector(const T* p) {
  if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const Loose*>(p);
  } else {
    alignas(64) float x[LANES];
    SIMD for (int j = 0; j < LANES; j++) x[j] = load(p + j);
    return *reinterpret_cast<const Vector*>(x);
  }
}

#if !defined(__clang__)  // clang has no shuffle by a vector of lanes, and uses the plain code below

// Transpose: each step swaps the off-diagonal blocks of all 2 STEP by 2 STEP blocks.
template <int STEP>
INLINE void transpose(Vector (&x)[LANES]) {
  if constexpr (STEP < LANES) {
    Lanes low, high;
    for (int j = 0; j < LANES; j++) {
      low[j] = j & STEP ? LANES + j - STEP : j;
      high[j] = j & STEP ? LANES + j : j + STEP;
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      if (i & STEP) continue;
      Vector a = x[i], b = x[i + STEP];
      x[i] = __builtin_shuffle(a, b, low);
      x[i + STEP] = __builtin_shuffle(a, b, high);
    }
    transpose<STEP * 2>(x);
  }
}
#endif

// to[k][COLUMNS] = b[., begin: begin + COLUMNS], zero beyond n.
template <class T>
static void pack_panel(Strided<T> b, int64_t begin, int64_t n, int64_t k, float* to) {
  const int64_t size = n - begin < COLUMNS ? n - begin : COLUMNS;
  const T* from = b.data + begin * b.column;
  if (size == COLUMNS && b.column == 1) {
    for (int64_t i = 0; i < k; i++) {
      SIMD for (int64_t j = 0; j < COLUMNS; j++) to[i * COLUMNS + j] = load(from + i * b.row + j);
    }
    return;
  }
  int64_t done = 0;
#if !defined(__clang__)
  if (size == COLUMNS && b.row == 1) {
    for (; done + LANES <= k; done += LANES) {
      for (int64_t half = 0; half < COLUMNS; half += LANES) {
        Vector x[LANES];
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) x[j] = load_vector(from + (half + j) * b.column + done);
        transpose<1>(x);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) *reinterpret_cast<Loose*>(to + (done + i) * COLUMNS + half) = x[i];
      }
    }
  }
#endif
  for (int64_t i = done; i < k; i++) {
    for (int64_t j = 0; j < size; j++) to[i * COLUMNS + j] = load(from + i * b.row + j * b.column);
    for (int64_t j = size; j < COLUMNS; j++) to[i * COLUMNS + j] = 0;
  }
}

// Pack the panels of columns begin to end, one after the other. Contiguous rows of b are read at once.
template <class T>
static void pack_block(Strided<T> b, int64_t begin, int64_t end, int64_t n, int64_t k, float* to) {
  if (b.column != 1) {
    for (int64_t j = begin; j < end; j += COLUMNS) pack_panel(b, j, n, k, to + (j - begin) * k);
    return;
  }
  const int64_t whole = begin + (end - begin) / COLUMNS * COLUMNS;
  for (int64_t i = 0; i < k; i++) {
    const T* from = b.data + i * b.row;
    for (int64_t j = begin; j < whole; j += COLUMNS) {
      float* panel = to + (j - begin) * k + i * COLUMNS;
      SIMD for (int64_t c = 0; c < COLUMNS; c++) panel[c] = load(from + j + c);
    }
  }
  if (whole < end) pack_panel(b, whole, n, k, to + (whole - begin) * k);
}

// to[k][rows] = a[begin: begin + rows, .]
static void pack_tile(Strided<float> a, int64_t begin, int64_t rows, int64_t k, float* to) {
  const float* from = a.data + begin * a.row;
  if (a.row == 1) {
#if defined(__AVX512F__)
    const __mmask16 these = static_cast<__mmask16>((1u << rows) - 1);
    for (int64_t i = 0; i < k; i++)
      _mm512_mask_storeu_ps(to + i * rows, these, _mm512_maskz_loadu_ps(these, from + i * a.column));
#else
    for (int64_t i = 0; i < k; i++)
      for (int64_t r = 0; r < rows; r++) to[i * rows + r] = from[i * a.column + r];
#endif
  } else {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < k; i++) to[i * rows + r] = from[r * a.row + i];
  }
}

// Address in the next part of b to prefetch, and its advance per step of the multiplication, so that the data arrive in
// time but not too early.
struct Ahead {
  const char* at;
  int64_t step;
  Ahead(const void* begin, const void* end, int64_t most, int64_t steps) {
    const int64_t there = static_cast<const char*>(end) - static_cast<const char*>(begin);
    const int64_t bytes = least(there < 0 ? 0 : there, most);
    at = static_cast<const char*>(begin);
    step = steps < 1 ? 0 : least((bytes + steps - 1) / steps, 64);
  }
};

enum How { STORE, ADD, STREAM };

INLINE void put(float* to, Vector x, How how) {
#if defined(__AVX512F__)
  if (how == STREAM && reinterpret_cast<uintptr_t>(to) % 64 == 0) return _mm512_stream_ps(to, x);
#endif
  *reinterpret_cast<Loose*>(to) = how == ADD ? x + load_vector(to) : x;
}

INLINE void put(bf16* to, Vector x, How) { SIMD for (int j = 0; j < LANES; j++) store(to + j, x[j]); }

// out[M][COLUMNS] (+)= a tile of a, [k][M], times a panel of b. `ahead` advances by k steps.
template <int M, class O>
static void tile(int64_t k, const float* a, const float* b, O* out, int64_t row, How how, Ahead& ahead) {
  Vector low[M], high[M];
#pragma GCC unroll 12
  for (int r = 0; r < M; r++) low[r] = high[r] = Vector{};
  const char* next = ahead.at;
  const int64_t step = ahead.step;
  for (int64_t i = 0; i < k; i++, a += M, b += COLUMNS, next += step) {
    __builtin_prefetch(next, 0, 2);
    const Vector first = load_vector(b), second = load_vector(b + LANES);
#pragma GCC unroll 12
    for (int r = 0; r < M; r++) {
      low[r] += a[r] * first;
      high[r] += a[r] * second;
    }
  }
  ahead.at = next;
#pragma GCC unroll 12
  for (int r = 0; r < M; r++) {
    put(out + r * row, low[r], how);
    put(out + r * row + LANES, high[r], how);
  }
}

template <class O>
using Tile = void (*)(int64_t, const float*, const float*, O*, int64_t, How, Ahead&);
template <class O>
static const Tile<O> tile_of[] = {
    nullptr,    tile<1, O>, tile<2, O>, tile<3, O>,  tile<4, O>,  tile<5, O>,  tile<6, O>,
#if defined(__AVX512F__)
    tile<7, O>, tile<8, O>, tile<9, O>, tile<10, O>, tile<11, O>, tile<12, O>,
#endif
};

constexpr int64_t BLOCK = 1 << 16;  // floats of b that are repacked at a time
constexpr int64_t FAR = 1 << 18;    // size of out in floats from which it is written past the caches

static int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Size of a block of b: [depth, width]. Contiguous rows of b and of out are processed whole if possible. For a wide b,
// that means adding up parts of k, which is done only if out stays in a cache.
static void block_of(int64_t m, int64_t n, int64_t k, bool by_rows, bool can_add, int64_t& depth, int64_t& width) {
  if (by_rows && can_add && m * n <= 2 * BLOCK) {
    width = round_up(n, COLUMNS);
    depth = BLOCK / width < 32 ? 32 : BLOCK / width;
    if (depth > k) depth = k;
  } else {
    depth = k;
    width = BLOCK / (k < 1 ? 1 : k) / COLUMNS * COLUMNS;
    if (width < COLUMNS) width = COLUMNS;
    if (width > n) width = round_up(n, COLUMNS);
  }
}

static int64_t gemm_work(int64_t m, int64_t n, int64_t k) {
  int64_t wide = 0, deep = 0, width, depth;
  block_of(m, n, k, true, true, depth, width);
  wide = depth * width;
  block_of(m, n, k, false, false, depth, width);
  deep = depth * width;
  return m * k + (wide > deep ? wide : deep) + ROWS * COLUMNS + 64;
}

template <class B, class O>
static void gemm(int64_t m, int64_t n, int64_t k, Strided<float> a, Strided<B> b, O* out, int64_t row, bool add,
                 float* work) {
  // Tiles have nearly the same number of rows: one with few rows has too few sums to hide the latency of additions.
  const int64_t tiles = (m + ROWS - 1) / ROWS;
  int64_t depth, width;
  block_of(m, n, k, b.column == 1, sizeof(O) == 4, depth, width);
  float* sum = work + (16 - (reinterpret_cast<uintptr_t>(work) / 4) % 16) % 16;
  float* block = sum + ROWS * COLUMNS;
  float* packed = block + depth * width;
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t begin = t * m / tiles, end = (t + 1) * m / tiles;
    pack_tile(a, begin, end - begin, k, packed + begin * k);
  }
  const How first = add ? ADD : m * n >= FAR && depth >= k ? STREAM : STORE;
  // Blocks of b are contiguous if a block spans all of k or all of n.
  const bool is_run = (depth == k && b.row == 1 && b.column == k) || (width >= n && b.column == 1 && b.row == n);
  for (int64_t i = 0; i < k || i == 0; i += depth) {
    const int64_t deep = least(k - i, depth);
    const How how = i ? ADD : first;
    for (int64_t j = 0; j < n; j += width) {
      const int64_t end = least(n, j + width);
      pack_block(Strided<B>{b.data + i * b.row, b.row, b.column}, j, end, n, deep, block);
      const B* after = b.data + (b.row == 1 ? end * k : (i + deep) * n);
      const int64_t steps = tiles * ((end - j + COLUMNS - 1) / COLUMNS) * deep;
      Ahead ahead(is_run ? after : b.data, is_run ? b.data + n * k : b.data, depth * width * int64_t(sizeof(B)), steps);
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t begin = t * m / tiles, rows = (t + 1) * m / tiles - begin;
        const float* these = packed + begin * k + i * rows;
        for (int64_t c = j; c < end; c += COLUMNS) {
          const float* panel = block + (c - j) * deep;
          O* to = out + begin * row + c;
          const int64_t rest = n - c;
          if (rest >= COLUMNS) {
            tile_of<O>[rows](deep, these, panel, to, row, how, ahead);
            continue;
          }
          tile_of<float>[rows](deep, these, panel, sum, COLUMNS, STORE, ahead);
          for (int64_t r = 0; r < rows; r++)
            for (int64_t q = 0; q < rest; q++) {
              O* one = to + r * row + q;
              store(one, sum[r * COLUMNS + q] + (how == ADD ? load(one) : 0.f));
            }
        }
      }
    }
  }
#if defined(__AVX512F__)
  if (first == STREAM) _mm_sfence();
#endif
}

extern const Gemms gemms = {gemm<float, float>, gemm<bf16, float>, gemm<float, bf16>, gemm<bf16, bf16>, gemm_work};

}  // namespace FMOE_JOIN(isa_,FMOE_ISA)
}  // namespace fmoe

// Plain loops over rows, which the compiler vectorizes for the instruction set of this file, FMOE_ISA.
#include "scalars.h"

namespace fmoe {
namespace FMOE_JOIN(isa_, FMOE_ISA) {

INLINE float exp_(float x) {  // Cephes' expf: within 2 ulp; for x below -87.3, the least normal number
  x = x < -87.33654f ? -87.33654f : x;
  x = x > 88.37626f ? 88.37626f : x;
  float n = x * 1.44269504f + 12582912.0f;  // the nearest integer, in the low bits
  uint32_t power = to_bits(n) << 23;
  n -= 12582912.0f;
  float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return from_bits(to_bits(p) + power);
}

// `both` returns act(x) and its derivative. `second` returns value and derivative of the function that gated experts
// apply to the second half.
struct Pointwise {
  INLINE void second(float x, float& value, float& slope) {
    value = x;
    slope = 1.0f;
  }
};

struct Gelu : Pointwise {
  INLINE void both(float x, float& value, float& slope) {
    // Phi by erfc, Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7.
    float ax = x < 0 ? -x : x;
    float t = 1.0f / (1.0f + 0.3275911f * 0.70710678f * ax);
    float e = exp_(-0.5f * x * x);
    float p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    float tail = 0.5f * p * e;
    float phi = x < 0 ? tail : 1.0f - tail;
    value = x * phi;
    slope = phi + x * 0.39894228f * e;
  }
};

struct GeluTanh : Pointwise {
  INLINE void both(float x, float& value, float& slope) {
    const float a = 0.79788456f, b = 0.044715f;
    float z = a * (x + b * x * x * x);
    float half = 1.0f / (1.0f + exp_(-2.0f * z));  // (1 + tanh z) / 2
    value = x * half;
    slope = half + x * 2.0f * half * (1.0f - half) * a * (1.0f + 3.0f * b * x * x);
  }
};

struct Relu : Pointwise {
  INLINE void both(float x, float& value, float& slope) {
    value = x < 0 ? 0.0f : x;  // NaN stays NaN
    slope = x > 0 ? 1.0f : 0.0f;
  }
};

struct Silu : Pointwise {
  INLINE void both(float x, float& value, float& slope) {
    float s = 1.0f / (1.0f + exp_(-x));
    value = x * s;
    slope = s + value * (1.0f - s);
  }
};

struct SwigluOai {  // SwiGLUOAI of fmoe/kernels/glu.py; comparisons leave NaN
  INLINE void both(float x, float& value, float& slope) {
    const float a = 1.702f, g = x > 7.0f ? 7.0f : x;
    float s = 1.0f / (1.0f + exp_(-a * g));
    value = g * s;
    slope = x <= 7.0f ? s + a * value * (1.0f - s) : 0.0f;
  }
  INLINE void second(float x, float& value, float& slope) {
    const float low = x < -7.0f ? -7.0f : x;
    value = (low > 7.0f ? 7.0f : low) + 1.0f;
    slope = x >= -7.0f && x <= 7.0f ? 1.0f : 0.0f;
  }
};

template <class T, class C>
static void gather(const T* x, const int64_t* index, int64_t per, int64_t n, int64_t d, C* out) {
  for (int64_t i = 0; i < n; i++) {
    const T* from = x + (index ? index[i] / per : i) * d;
    C* to = out + i * d;
    SIMD for (int64_t j = 0; j < d; j++) store(to + j, load(from + j));
  }
}

template <class A, class B>
static void convert(const A* x, int64_t size, B* out) {
  SIMD for (int64_t j = 0; j < size; j++) store(out + j, load(x + j));
}

template <class Act, class T, class C>
static void activate_rows(const C* u, const T* bias, T* hidden, C* active, int64_t n, int64_t h, bool gated) {
  const int64_t p = gated ? 2 * h : h;
  for (int64_t i = 0; i < n; i++) {
    const C* from = u + i * p;
    T* to = hidden + i * p;
    if (bias) {
      SIMD for (int64_t j = 0; j < p; j++) store(to + j, load(from + j) + load(bias + j));
    } else if ((const void*)from != (const void*)to) {
      SIMD for (int64_t j = 0; j < p; j++) store(to + j, load(from + j));
    }
    C* a = active + i * h;
    if (gated) {
      SIMD for (int64_t j = 0; j < h; j++) {
        float value, slope, second, second_slope;
        Act::both(load(to + j), value, slope);
        Act::second(load(to + h + j), second, second_slope);
        store(a + j, value * second);
      }
    } else {
      SIMD for (int64_t j = 0; j < h; j++) {
        float value, slope;
        Act::both(load(to + j), value, slope);
        store(a + j, value);
      }
    }
  }
}

template <class Act, class T, class C>
static void activate_rows_backward(const T* hidden, const C* d_active, const float* scale, C* scaled, C* d_hidden,
                                   float* d_scale, int64_t n, int64_t h, bool gated) {
  const int64_t p = gated ? 2 * h : h;
  for (int64_t i = 0; i < n; i++) {
    const T* x = hidden + i * p;
    const C* up = d_active + i * h;
    C* a = scaled + i * h;
    C* dx = d_hidden + i * p;
    const float s = scale ? scale[i] : 1.0f;
    float dot = 0;
    if (gated) {
#pragma omp simd reduction(+ : dot)
      for (int64_t j = 0; j < h; j++) {
        float value, slope, second, second_slope, g = load(up + j);
        Act::both(load(x + j), value, slope);
        Act::second(load(x + h + j), second, second_slope);
        dot += value * second * g;
        store(a + j, value * second * s);
        store(dx + j, g * s * second * slope);
        store(dx + h + j, g * s * value * second_slope);
      }
    } else {
#pragma omp simd reduction(+ : dot)
      for (int64_t j = 0; j < h; j++) {
        float value, slope, g = load(up + j);
        Act::both(load(x + j), value, slope);
        dot += value * g;
        store(a + j, value * s);
        store(dx + j, g * s * slope);
      }
    }
    if (d_scale) d_scale[i] += dot;
  }
}

template <class T, class C>
static void activate(const C* u, const T* bias, T* hidden, C* active, int64_t n, int64_t h, Activation act,
                     bool gated) {
  switch (act) {
    case GELU:
      return activate_rows<Gelu>(u, bias, hidden, active, n, h, gated);
    case GELU_TANH:
      return activate_rows<GeluTanh>(u, bias, hidden, active, n, h, gated);
    case RELU:
      return activate_rows<Relu>(u, bias, hidden, active, n, h, gated);
    case SILU:
      return activate_rows<Silu>(u, bias, hidden, active, n, h, gated);
    case SWIGLU_OAI:
      return activate_rows<SwigluOai>(u, bias, hidden, active, n, h, gated);
  }
}

template <class T, class C>
static void activate_backward(const T* hidden, const C* d_active, const float* scale, C* scaled, C* d_hidden,
                              float* d_scale, int64_t n, int64_t h, Activation act, bool gated) {
  switch (act) {
    case GELU:
      return activate_rows_backward<Gelu>(hidden, d_active, scale, scaled, d_hidden, d_scale, n, h, gated);
    case GELU_TANH:
      return activate_rows_backward<GeluTanh>(hidden, d_active, scale, scaled, d_hidden, d_scale, n, h, gated);
    case RELU:
      return activate_rows_backward<Relu>(hidden, d_active, scale, scaled, d_hidden, d_scale, n, h, gated);
    case SILU:
      return activate_rows_backward<Silu>(hidden, d_active, scale, scaled, d_hidden, d_scale, n, h, gated);
    case SWIGLU_OAI:
      return activate_rows_backward<SwigluOai>(hidden, d_active, scale, scaled, d_hidden, d_scale, n, h, gated);
  }
}

template <class T, class C>
static void finish(const C* y, const T* bias, T* out, int64_t n, int64_t d) {
  for (int64_t i = 0; i < n; i++, y += d, out += d) {
    if (bias) {
      SIMD for (int64_t j = 0; j < d; j++) store(out + j, load(y + j) + load(bias + j));
    } else {
      SIMD for (int64_t j = 0; j < d; j++) store(out + j, load(y + j));
    }
  }
}

template <class T, class C>
static void dots(const C* x, const T* v, int64_t n, int64_t d, float* out) {
  for (int64_t i = 0; i < n; i++, x += d) {
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t j = 0; j < d; j++) dot += load(x + j) * load(v + j);
    out[i] = dot;
  }
}

template <class C>
static void column_sums(const C* x, const float* scale, int64_t n, int64_t d, int64_t begin, int64_t end, float* out) {
  for (int64_t i = 0; i < n; i++, x += d) {
    const float s = scale ? scale[i] : 1.0f;
    SIMD for (int64_t j = begin; j < end; j++) out[j] += s * load(x + j);
  }
}

template <class T>
static void gather_sum(const T* rows, const int64_t* place, const float* weight, int64_t num_rows, int64_t tokens,
                       int64_t k, int64_t d, T* out) {
  constexpr int64_t BLOCK = 256;  // columns whose sums stay in a near cache
  float sum[BLOCK];
  for (int64_t t = 0; t < tokens; t++, place += k, out += d) {
    for (int64_t begin = 0; begin < d; begin += BLOCK) {
      const int64_t size = d - begin < BLOCK ? d - begin : BLOCK;
      SIMD for (int64_t j = 0; j < size; j++) sum[j] = 0;
      for (int64_t i = 0; i < k; i++) {
        if (place[i] >= num_rows) continue;
        const T* row = rows + place[i] * d + begin;
        const float w = weight ? weight[t * k + i] : 1.0f;
        SIMD for (int64_t j = 0; j < size; j++) sum[j] += w * load(row + j);
      }
      SIMD for (int64_t j = 0; j < size; j++) store(out + begin + j, sum[j]);
    }
  }
}

// MurmurHash3's finalizer (public domain), applied twice, each time with half of the key: `_hash` of fmoe/random.py.
INLINE uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

INLINE uint32_t hash(uint64_t key, uint32_t counter) {
  return mix(mix(counter * 0x9e3779b1u + uint32_t(key)) ^ uint32_t(key >> 32));
}

static void draw_uniform(uint64_t key, uint32_t start, int64_t n, float bound, float* out) {
  SIMD for (int64_t i = 0; i < n; i++) {
    const int32_t number = int32_t(hash(key, start + uint32_t(i)) >> 8);
    out[i] = float(2 * number - (1 << 24)) * 0x1p-24f * bound;
  }
}

static void draw_normal(uint64_t key, uint32_t start, int64_t n, float std, const float* ends, float* out) {
  SIMD for (int64_t i = 0; i < n; i++) {
    const uint32_t x = hash(key, start + uint32_t(i));
    const float* end = ends + ((x >> 16) ^ 0x8000u);
    const double place = double(int32_t(2 * (x & 0xffff) + 1)) * 0x1p-17;
    out[i] = float(double(end[0]) + place * (double(end[1]) - double(end[0]))) * std;
  }
}

extern const Draws draws = {draw_uniform, draw_normal};

#define FMOE_TABLE(T, C)                                                                               \
  {gather<T, C>, convert<T, C>,  convert<C, T>, activate<T, C>, finish<T, C>, activate_backward<T, C>, \
   dots<T, C>,   column_sums<C>, gather_sum<T>}

extern const Kernels<float, float> kernels_ff = FMOE_TABLE(float, float);
extern const Kernels<bf16, float> kernels_bf = FMOE_TABLE(bf16, float);
extern const Kernels<bf16, bf16> kernels_bb = FMOE_TABLE(bf16, bf16);

}  // namespace FMOE_JOIN(isa_,FMOE_ISA)
}  // namespace fmoe

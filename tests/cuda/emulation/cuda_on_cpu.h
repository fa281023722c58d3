// Runs CUDA kernels on the CPU, so that their logic is tested without a GPU. A thread is a fiber, and blocks run one
// after another, both in an order that a seed shuffles. This file is included before the .cu file, and replaces CUDA's
// built-ins.
//
// What a GPU would let pass is an error here, which names the kernel and the line: a barrier or a warp operation that not
// all its threads come to, or that they come to in different lines; an address outside every array. Shared memory is
// poisoned before each block: NaN as float, out of any range as an index. What is not here (tensor cores, asynchronous
// copies, memory order between blocks) no kernel uses.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "fibers.h"

#define FMOE_EMULATED
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx (::emulation::current().thread)
#define blockIdx (::emulation::block().index)
#define blockDim (::emulation::block().threads)
#define gridDim (::emulation::block().blocks)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// Location of a call in the kernel: the defaults are those of the caller.
#define WHERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define HERE ::emulation::Where{__func__, file, line}

inline void __syncthreads(WHERE) { emulation::sync_block(HERE); }
inline void __threadfence() {}  // blocks run one after the other
inline void __syncwarp(unsigned mask = ~0u, WHERE) { emulation::meet(mask, 0, HERE); }

namespace emulation {
inline unsigned lane() { return current().number % 32; }

// The value that each lane of a warp gives to all.
template <class T>
struct Said {
  const uint64_t* values;
  T operator[](unsigned lane) const {
    T value;
    std::memcpy(&value, &values[lane], sizeof(T));
    return value;
  }
};

template <class T>
Said<T> say(unsigned mask, T value, Where where) {
  static_assert(sizeof(T) <= 8, "lanes exchange 8 bytes at most");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return {meet(mask, bits, where)};
}

template <class T, class F>
T fold(unsigned mask, T value, Where where, F join) {
  auto said = say(mask, value, where);
  bool is_first = true;
  for (unsigned l = 0; l < 32; l++)
    if (mask >> l & 1) value = is_first ? said[l] : join(value, said[l]), is_first = false;
  return value;
}
}  // namespace emulation

template <class T>
T __shfl_sync(unsigned mask, T value, int from, WHERE) {
  return emulation::say(mask, value, HERE)[from % 32];
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int with, WHERE) {
  return emulation::say(mask, value, HERE)[emulation::lane() ^ with];
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int by, WHERE) {
  auto said = emulation::say(mask, value, HERE);
  return int(emulation::lane()) >= by ? said[emulation::lane() - by] : value;
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int by, WHERE) {
  auto said = emulation::say(mask, value, HERE);
  return emulation::lane() + by < 32 ? said[emulation::lane() + by] : value;
}
inline unsigned __ballot_sync(unsigned mask, int is_true, WHERE) {
  auto said = emulation::say(mask, is_true != 0, HERE);
  unsigned bits = 0;
  for (unsigned l = 0; l < 32; l++)
    if (mask >> l & 1) bits |= unsigned(said[l]) << l;
  return bits;
}
inline int __any_sync(unsigned mask, int is_true, WHERE) { return __ballot_sync(mask, is_true, file, line) != 0; }
inline int __all_sync(unsigned mask, int is_true, WHERE) { return __ballot_sync(mask, is_true, file, line) == mask; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value, WHERE) {
  auto said = emulation::say(mask, value, HERE);
  unsigned same = 0;
  for (unsigned l = 0; l < 32; l++)
    if (mask >> l & 1) same |= unsigned(said[l] == value) << l;
  return same;
}
template <class T>
T __reduce_max_sync(unsigned mask, T value, WHERE) {
  static_assert(sizeof(T) == 4 && std::is_integral_v<T>, "32-bit integers, as on the device");
  return emulation::fold(mask, value, HERE, [](T a, T b) { return a < b ? b : a; });
}
template <class T>
T __reduce_min_sync(unsigned mask, T value, WHERE) {
  static_assert(sizeof(T) == 4 && std::is_integral_v<T>, "32-bit integers, as on the device");
  return emulation::fold(mask, value, HERE, [](T a, T b) { return b < a ? b : a; });
}
template <class T>
T __reduce_add_sync(unsigned mask, T value, WHERE) {
  static_assert(sizeof(T) == 4 && std::is_integral_v<T>, "32-bit integers, as on the device");
  return emulation::fold(mask, value, HERE, [](T a, T b) { return T(a + b); });
}

// Other threads may run before and after it; sums of integers do not depend on their order.
template <class T>
T atomicAdd(T* p, T value) {
  static_assert(std::is_integral_v<T>, "sums of floats depend on the order of threads");
  emulation::maybe_yield();
  T old = *p;
  *p = T(old + value);
  return old;
}
template <class T>
T atomicMax(T* p, T value) {
  emulation::maybe_yield();
  T old = *p;
  *p = old < value ? value : old;
  return old;
}
template <class T>
T atomicMin(T* p, T value) {
  emulation::maybe_yield();
  T old = *p;
  *p = value < old ? value : old;
  return old;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }

inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
using std::isinf;
using std::isnan;

// Replacements for the instructions in common.cuh.
namespace fmoe {
inline char* shared_memory() { return emulation::shared_memory(); }

inline float half_to_float(unsigned short bits) {
  const unsigned sign = unsigned(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
  const float size = exponent ? std::ldexp(float(fraction | 1024), int(exponent) - 25) : std::ldexp(float(fraction), -24);
  return sign ? -size : size;
}

inline unsigned half_bits(float x) {  // to nearest, ties to even
  const unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000;
  if (x != x) return 0x7fff;
  const float size = std::fabs(x);
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size == 0) return sign;
  int exponent;
  std::frexp(size, &exponent);  // size < 2^exponent
  const int unit = exponent - 11 < -24 ? -24 : exponent - 11;
  const auto steps = unsigned(std::nearbyint(std::ldexp(size, -unit)));  // of the last place: 2048 of them carry over
  return sign | ((unit + 24) * 1024u + steps);
}

inline unsigned bfloat_bits(float x) {  // to nearest, ties to even
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline unsigned two_halves(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
inline unsigned two_bfloats(float low, float high) { return bfloat_bits(low) | bfloat_bits(high) << 16; }
}  // namespace fmoe

// The table of a library: EMULATED(fmoe::gather<float, float>), ... between KERNELS( and ).
namespace emulation {
template <class... P>
struct Signature {
  template <class A>
  static constexpr char letter() {
    if (std::is_pointer_v<A>) return std::is_const_v<std::remove_pointer_t<A>> ? 'c' : 'p';
    return std::is_same_v<A, double> ? 'd' : 'i';
  }
  // c (a pointer to constants), p (a pointer), i (int64) or d (double) for each argument.
  static const char* text(void (*)(P...)) {
    static_assert(((std::is_pointer_v<P> || std::is_same_v<P, double> || std::is_same_v<P, long long>)&&...));
    static const char letters[] = {letter<P>()..., 0};
    return letters;
  }
  template <size_t... I>
  static void call(void (*kernel)(P...), void** values, std::index_sequence<I...>) {
    kernel(*static_cast<P*>(values[I])...);
  }
};

template <class... P>
Signature<P...> signature_of(void (*)(P...)) {
  return {};
}

template <auto KERNEL>
void call(void** values) {
  using Its = decltype(signature_of(KERNEL));
  [&]<class... P>(void (*kernel)(P...)) {
    Its::call(kernel, values, std::index_sequence_for<P...>());
  }(KERNEL);
}

struct Entry {
  const char* name;
  const char* signature;
  void (*call)(void**);
};

template <auto KERNEL>
Entry entry(const char* name) {
  return {name, decltype(signature_of(KERNEL))::text(KERNEL), call<KERNEL>};
}
}  // namespace emulation

#define EMULATED(...) ::emulation::entry<__VA_ARGS__>(#__VA_ARGS__)
#define KERNELS(...)                                                                                           \
  static const ::emulation::Entry entries[] = {__VA_ARGS__};                                                   \
  static const ::emulation::Entry* find(const char* name) {                                                    \
    for (auto& entry : entries)                                                                                \
      if (!std::strcmp(entry.name, name)) return &entry;                                                       \
    return nullptr;                                                                                            \
  }                                                                                                            \
  extern "C" SEEN const char* signature(const char* name) {                                                    \
    return find(name) ? find(name)->signature : nullptr;                                                       \
  }                                                                                                            \
  extern "C" SEEN const char* launch(const char* name, const unsigned* grid, const unsigned* threads,          \
                                     size_t shared, void** values, uint64_t seed) {                            \
    return ::emulation::launch(name, find(name)->call, grid, threads, shared, values, seed);                   \
  }

// Fibers of a block: their order, barriers and warp operations, shared memory, and the arrays that kernels may touch.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#define SEEN __attribute__((visibility("default"), used))

namespace emulation {

struct Dim {
  unsigned x, y, z;
};

struct Where {
  const char *what, *file;
  int line;
  bool operator==(const Where& other) const { return line == other.line && !std::strcmp(file, other.file); }
  std::string text() const {
    const char* slash = std::strrchr(file, '/');
    return std::string(what) + " in " + (slash ? slash + 1 : file) + ":" + std::to_string(line);
  }
};

enum State { READY, AT_BARRIER, AT_MEETING, DONE };

struct Fiber {
  Dim thread{};
  unsigned number = 0;
  State state = READY;
  bool is_started = false;
  Where where{"", "", 0};
  ucontext_t start;
  jmp_buf here;
  std::unique_ptr<char[]> stack;
};

// Lanes of a warp that exchange values. Two sets of values alternate: a fast lane may be at the next meeting while
// others still read.
struct Warp {
  unsigned mask = 0, arrived = 0, done = 0;
  bool turn = false;
  Where where{"", "", 0};
  uint64_t values[2][32];
};

struct Block {
  Dim index{}, threads{}, blocks{};
  unsigned size = 0, at_barrier = 0, done = 0;
  Where barrier{"", "", 0};
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<unsigned> order;
};

constexpr size_t STACK = 128 * 1024;
constexpr uint32_t POISON = 0x7fc0dead;  // a NaN, and out of range as an index

struct Machine {
  Block block;
  Fiber* current = nullptr;
  void (*call)(void**) = nullptr;
  void** values = nullptr;
  jmp_buf scheduler;
  uint64_t random = 1;
  std::string kernel, error;
  char* shared = nullptr;
  char* shared_begin = nullptr;
  size_t shared_room = 0;
  struct Region {
    size_t bytes;
    char *data, *data_end;
    std::string name;
  };
  std::map<char*, Region> regions;  // arrays, by the start of their pages
};

inline Machine machine;
inline Block& block() { return machine.block; }
inline Fiber& current() { return *machine.current; }
inline char* shared_memory() { return machine.shared_begin; }

inline uint64_t draw() {  // xorshift
  auto& x = machine.random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return x;
}

inline std::string name_of(const Dim& d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

// Ends the launch; unfinished work of the fibers is abandoned.
[[noreturn]] inline void fail(const std::string& message) {
  machine.error = machine.kernel + ", block " + name_of(block().index) + ", thread " + name_of(current().thread) + ": " +
                  message;
  _longjmp(machine.scheduler, 1);
}

[[gnu::noinline]] inline void yield() {
  if (!_setjmp(current().here)) _longjmp(machine.scheduler, 1);
}

inline void maybe_yield() {
  if (draw() % 4 == 0) yield();
}

inline void sync_block(Where where) {
  Block& b = block();
  if (b.done) fail("divergent barrier: at " + where.text() + ", but " + std::to_string(b.done) + " threads have ended");
  if (!b.at_barrier) b.barrier = where;
  if (!(b.barrier == where))
    fail("divergent barrier: at " + where.text() + ", but others wait at " + b.barrier.text());
  if (++b.at_barrier == b.size) {
    b.at_barrier = 0;
    for (auto& fiber : b.fibers)
      if (fiber.state == AT_BARRIER) fiber.state = READY;
    maybe_yield();  // the last one to arrive need not be the first to continue
    return;
  }
  current().state = AT_BARRIER, current().where = where;
  yield();
}

// Meeting of the lanes of `mask`; returns the value of each.
inline const uint64_t* meet(unsigned mask, uint64_t value, Where where) {
  Fiber& me = current();
  const unsigned lane = me.number % 32, first = me.number - lane;
  Warp& warp = block().warps[me.number / 32];
  if (!(mask >> lane & 1)) fail("lane " + std::to_string(lane) + " is not in its own mask at " + where.text());
  if (mask & warp.done) fail("divergent warp: at " + where.text() + ", but lanes of the mask have ended");
  if (!warp.arrived) warp.mask = mask, warp.where = where;
  if (warp.mask != mask || !(warp.where == where))
    fail("divergent warp: at " + where.text() + ", but other lanes are at " + warp.where.text());
  uint64_t* values = warp.values[warp.turn];
  values[lane] = value;
  warp.arrived |= 1u << lane;
  if (warp.arrived == mask) {
    warp.arrived = 0, warp.turn = !warp.turn;
    for (unsigned l = 0; l < 32 && first + l < block().size; l++) {
      Fiber& fiber = block().fibers[first + l];
      if (fiber.state == AT_MEETING && mask >> l & 1) fiber.state = READY;
    }
    maybe_yield();
  } else {
    me.state = AT_MEETING, me.where = where;
    yield();
  }
  return values;
}

// The life of a fiber: one thread of block after block.
inline void live() {
  for (;;) {
    machine.call(machine.values);
    Fiber& me = current();
    Warp& warp = block().warps[me.number / 32];
    warp.done |= 1u << me.number % 32;
    if (block().at_barrier) fail("divergent barrier: ends, but others wait at " + block().barrier.text());
    if (warp.arrived && warp.mask & warp.done)
      fail("divergent warp: ends, but others wait at " + warp.where.text());
    me.state = DONE;
    block().done++;
    yield();
  }
}

// Runs a fiber until it yields; returns false if the launch has failed.
[[gnu::noinline]] inline bool resume(Fiber& fiber) {
  machine.current = &fiber;
  if (!_setjmp(machine.scheduler)) {
    if (fiber.is_started) _longjmp(fiber.here, 1);
    fiber.is_started = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get(), fiber.start.uc_stack.ss_size = STACK;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, live, 0);
    setcontext(&fiber.start);
  }
  return machine.error.empty();
}

template <class T>
void shuffle(T& items) {
  for (size_t i = items.size(); i > 1; i--) std::swap(items[i - 1], items[draw() % i]);
}

inline void poison(char* begin, char* end) {
  for (char* p = begin; p < end; p++) *p = char(POISON >> 8 * (uintptr_t(p) % 4));
}

inline bool is_poison(const char* begin, const char* end) {
  for (const char* p = begin; p < end; p++)
    if (*p != char(POISON >> 8 * (uintptr_t(p) % 4))) return false;
  return true;
}

inline size_t page() { return size_t(sysconf(_SC_PAGESIZE)); }

// Pages between two protected pages.
inline char* map_pages(size_t bytes) {
  void* data = mmap(nullptr, bytes + 2 * page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) std::abort();
  char* begin = static_cast<char*>(data) + page();
  if (mprotect(begin, bytes, PROT_READ | PROT_WRITE)) std::abort();
  return begin;
}

inline void unmap_pages(char* begin, size_t bytes) { munmap(begin - page(), bytes + 2 * page()); }

inline void run_block() {
  Block& b = block();
  b.at_barrier = b.done = 0;
  std::fill(b.warps.begin(), b.warps.end(), Warp{});
  for (auto& fiber : b.fibers) fiber.state = READY;
  poison(machine.shared, machine.shared + machine.shared_room);
  while (b.done < b.size) {
    bool is_stuck = true;
    shuffle(b.order);
    for (unsigned i : b.order) {
      if (b.fibers[i].state != READY) continue;
      is_stuck = false;
      if (!resume(b.fibers[i])) return;
    }
    if (!is_stuck) continue;
    for (auto& fiber : b.fibers)
      if (fiber.state == AT_MEETING) machine.current = &fiber;
    machine.error = machine.kernel + ", block " + name_of(b.index) + ": divergent barrier: thread " +
                    name_of(current().thread) + " waits at " + current().where.text() + ", others at " +
                    b.barrier.text();
    return;
  }
}

// An address outside every array.
inline void on_fault(int, siginfo_t* info, void*) {
  char* address = static_cast<char*>(info->si_addr);
  std::string near = "nothing known";
  for (auto& [begin, region] : machine.regions)
    if (address >= begin - page() && address < begin + region.bytes + page()) {
      const long past = address >= region.data_end ? address - region.data_end : region.data - address;
      near = std::to_string(past) + " bytes " + (address >= region.data_end ? "past the end of " : "before ") +
             region.name;
    }
  fail("touches an address outside every array: " + near);
}

// null, or a description of the error.
inline const char* launch(const char* name, void (*call)(void**), const unsigned* grid, const unsigned* threads,
                          size_t shared, void** values, uint64_t seed) {
  Machine& m = machine;
  Block& b = m.block;
  m.kernel = name, m.error.clear(), m.call = call, m.values = values;
  m.random = seed * 0x9e3779b97f4a7c15u | 1;
  b.threads = {threads[0], threads[1], threads[2]}, b.blocks = {grid[0], grid[1], grid[2]};
  b.size = threads[0] * threads[1] * threads[2];
  if (b.size == 0 || b.size > 1024 || b.size % 32 || grid[0] == 0 || grid[1] == 0 || grid[2] == 0 ||
      grid[1] > 65535 || grid[2] > 65535)
    return (m.error = m.kernel + ": blocks of " + name_of(b.threads) + ", grid " + name_of(b.blocks)).c_str();
  if (b.fibers.size() < b.size) b.fibers.resize(1024);
  b.order.clear();
  for (unsigned i = 0; i < b.size; i++) {
    Fiber& fiber = b.fibers[i];
    if (!fiber.stack) fiber.stack.reset(new char[STACK]);
    fiber.number = i;
    fiber.thread = {i % threads[0], i / threads[0] % threads[1], i / (threads[0] * threads[1])};
    b.order.push_back(i);
  }
  b.warps.resize(b.size / 32);
  m.shared_room = (shared + page() - 1) / page() * page();
  m.shared = map_pages(m.shared_room);
  m.shared_begin = m.shared + m.shared_room - (shared + 15) / 16 * 16;
  m.regions[m.shared] = {m.shared_room, m.shared_begin, m.shared_begin + shared, "shared memory"};
  struct sigaction ours = {}, segv, bus;
  ours.sa_sigaction = on_fault, ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &ours, &segv), sigaction(SIGBUS, &ours, &bus);
  std::vector<uint64_t> order(uint64_t(grid[0]) * grid[1] * grid[2]);
  for (uint64_t i = 0; i < order.size(); i++) order[i] = i;
  shuffle(order);
  for (uint64_t i : order) {
    b.index = {unsigned(i % grid[0]), unsigned(i / grid[0] % grid[1]), unsigned(i / grid[0] / grid[1])};
    run_block();
    if (!m.error.empty()) break;
    if (!is_poison(m.shared, m.shared_begin) || !is_poison(m.shared_begin + shared, m.shared + m.shared_room)) {
      m.error = m.kernel + ", block " + name_of(b.index) + ": writes beside its " + std::to_string(shared) +
                " bytes of shared memory";
      break;
    }
  }
  sigaction(SIGSEGV, &segv, nullptr), sigaction(SIGBUS, &bus, nullptr);
  m.regions.erase(m.shared);
  unmap_pages(m.shared, m.shared_room);
  if (m.error.empty()) return nullptr;
  for (auto& fiber : b.fibers) fiber.is_started = false;  // they are suspended somewhere in a kernel
  return m.error.c_str();
}

}  // namespace emulation

// A poisoned array of this size between protected pages: it ends `gap` bytes before the second one.
extern "C" SEEN inline char* allocate(size_t bytes, size_t gap, const char* name) {
  using namespace emulation;
  const size_t room = (bytes + gap + page() - 1) / page() * page();
  char* begin = map_pages(room);
  poison(begin, begin + room);
  char* end = begin + room - gap;
  machine.regions[begin] = {room, end - bytes, end, name};
  return end - bytes;
}

// Whether nothing was written next to the array; frees the array.
extern "C" SEEN inline int release(char* data) {
  using namespace emulation;
  auto found = machine.regions.upper_bound(data);
  const auto& [begin, region] = *--found;
  const bool is_whole = is_poison(begin, region.data) && is_poison(region.data_end, begin + region.bytes);
  unmap_pages(begin, region.bytes);
  machine.regions.erase(found);
  return is_whole;
}

// Reused memory: for tensors, and for the work of a thread on an expert.
#pragma once
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fmoe {
namespace {

using at::Tensor;

constexpr size_t PAGE = 2 << 20;  // a huge page: blocks that begin and end at multiples of this size can use huge pages

// Whether large blocks use huge pages: with small pages, reading the weights of many experts misses the TLB on nearly
// every page.
std::atomic<bool> huge_pages{true};

void want_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes, [[maybe_unused]] bool now) {
#ifdef MADV_HUGEPAGE
  if (!huge_pages || madvise(data, bytes, MADV_HUGEPAGE) || !now) return;
  constexpr int COLLAPSE = 25;  // MADV_COLLAPSE of Linux 6.1: pages that were touched already are moved at once
  madvise(data, bytes, COLLAPSE);
#endif
}

// Reused large blocks. malloc would map fresh pages for each block and return them, and the first touch of a page takes
// longer than any work on it. Blocks that PATIENCE requests did not use return to the system.
class Pool {
 public:
  static Pool& get() {
    static Pool* pool = new Pool;  // never destroyed: tensors may outlive it
    return *pool;
  }

  Tensor take(at::IntArrayRef sizes, at::TensorOptions options) {
    size_t bytes = options.dtype().itemsize() * c10::multiply_integers(sizes);
    if (bytes < SMALLEST) return at::empty(sizes, options);
    Block block = find(bytes);
    return at::from_blob(block.data, sizes, [block](void*) { Pool::get().give(block); }, options);
  }

 private:
  static constexpr size_t SMALLEST = 1 << 20;
  static constexpr uint64_t PATIENCE = 256;
  struct Block {
    void* data;
    size_t bytes;
    uint64_t used = 0;
  };

  Block find(size_t bytes) {
    std::vector<Block> old;
    Block found{nullptr, 0};
    {
      std::lock_guard<std::mutex> guard(lock_);
      clock_++;
      auto best = free_.end();
      for (auto it = free_.begin(); it != free_.end(); ++it)
        if (it->bytes >= bytes && it->bytes < 2 * bytes + PAGE && (best == free_.end() || it->bytes < best->bytes))
          best = it;
      if (best != free_.end()) {
        found = *best;
        free_.erase(best);
      }
      for (auto it = free_.begin(); it != free_.end();) {
        if (clock_ - it->used > PATIENCE) {
          old.push_back(*it);
          it = free_.erase(it);
        } else {
          ++it;
        }
      }
    }
    for (auto& block : old) munmap(block.data, block.bytes);
    if (found.data) return found;
    // Sizes change from step to step with the routing: some extra bytes make the block fit the next step too.
    size_t size = (bytes + bytes / 8 + PAGE - 1) / PAGE * PAGE;
    void* data = mmap(nullptr, size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, data != MAP_FAILED, "fmoe: no memory for ", size, " bytes");
    auto begin = (uintptr_t(data) + PAGE - 1) / PAGE * PAGE;  // aligned for huge pages
    if (begin > uintptr_t(data)) munmap(data, begin - uintptr_t(data));
    if (auto rest = uintptr_t(data) + PAGE - begin; rest > 0) munmap((void*)(begin + size), rest);
    want_huge_pages((void*)begin, size, false);
    return {(void*)begin, size};
  }

  void give(Block block) {
    std::lock_guard<std::mutex> guard(lock_);
    block.used = clock_;
    free_.push_back(block);
  }

  std::mutex lock_;
  std::vector<Block> free_;
  uint64_t clock_ = 0;
};

// Large memory outside the pool: weights, and the tensors to which their gradients are added. `at` moves it to huge
// pages at its first use; if that is impossible (shared memory, for example), it stays unchanged.
class Met {
 public:
  static void at(const Tensor& t) {
    static Met* met = new Met;
    const size_t bytes = t.nbytes();
    const uintptr_t data = uintptr_t(t.const_data_ptr());
    const uintptr_t begin = (data + PAGE - 1) / PAGE * PAGE, end = (data + bytes) / PAGE * PAGE;
    if (huge_pages && begin < end && met->is_new(data, bytes)) want_huge_pages((void*)begin, end - begin, true);
  }

 private:
  static constexpr size_t MOST = 4096;
  bool is_new(uintptr_t data, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock_);
    if (met_.size() >= MOST) met_.clear();
    auto [it, is_first] = met_.try_emplace(data, bytes);
    return is_first || std::exchange(it->second, bytes) != bytes;
  }
  std::mutex lock_;
  std::unordered_map<uintptr_t, size_t> met_;
};

// A thread's memory for one expert, by purpose.
enum Slot { ROWS, GRAD, W_IN, W_OUT, BEFORE, ACTIVE, D_ACTIVE, D_HIDDEN, OUT, SCALES, WORK, NUM_SLOTS };

template <class C>
C* scratch(Slot slot, int64_t size) {
  static thread_local Tensor slots[NUM_SLOTS];
  auto& block = slots[slot];
  int64_t bytes = size * int64_t(sizeof(C)) + 64;
  if (!block.defined() || block.numel() < bytes) {
    block = Tensor();
    block = Pool::get().take({bytes}, at::TensorOptions().dtype(at::kByte));
  }
  return static_cast<C*>(block.data_ptr());
}

}  // namespace
}  // namespace fmoe

// PooledMemory: the common part of all memory schemes over a KvPool: handles, leases, counters, recount. A
// scheme adds the struct of its sequence, and how a sequence's tokens are laid on blocks.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "allocator/kv_memory.h"
#include "allocator/kv_pool.h"
#include "allocator/schemes.h"
#include "base/device/device.h"

namespace xpyd::allocator {

// Maps small integers to objects that come and go. An object keeps its heap memory for the next user of its handle
// (T::clear() must keep capacity), so a steady state allocates nothing.
template <class T>
class HandleTable {
 public:
  int32_t add() {
    if (unused_.empty()) {
      unused_.push_back(int32_t(items_.size()));
      items_.push_back(std::make_unique<Item>());  // references to the others stay valid
    }
    int32_t handle = unused_.back();
    unused_.pop_back();
    items_[size_t(handle)]->live = true;
    return handle;
  }
  T& operator[](int32_t handle) { return find(handle).value; }
  const T& operator[](int32_t handle) const { return const_cast<HandleTable*>(this)->find(handle).value; }
  void remove(int32_t handle) {
    Item& item = find(handle);
    item.live = false;
    item.value.clear();
    unused_.push_back(handle);
  }
  template <class F>
  void for_each(F&& f) const {
    for (const auto& item : items_)
      if (item->live) f(item->value);
  }

 private:
  struct Item {
    T value;
    bool live = false;
  };
  Item& find(int32_t handle) {
    XPYD_CHECK(handle >= 0 && size_t(handle) < items_.size() && items_[size_t(handle)]->live,
               "handle " + std::to_string(handle) + " is not in use");
    return *items_[size_t(handle)];
  }
  std::vector<std::unique_ptr<Item>> items_;
  std::vector<int32_t> unused_;
};

struct SequenceTokens {  // part of every scheme's sequence
  int written = 0;
  int room = 0;  // tokens that may be written without another append
};

class PooledMemory : public KvMemory, public KvLeases, public KvCache {
 public:
  // `places`: where views point, if not into the pool. `handoff`: that of a scheme that has it.
  PooledMemory(std::shared_ptr<KvPool> pool, const KvOptions& options, const char* name,
               std::optional<KvPlaces> places = {}, KvHandoff* handoff = nullptr);
  ~PooledMemory() override;

  void free(KvHandle handle) override;
  using KvMemory::pin;
  KvLease pin(KvHandle handle, int token_begin, int token_end) override;
  void unpin(KvLease lease) override;
  KvStats stats() const override;
  std::vector<KvState> states() const override { return pool_->states(); }
  void clear_prefix_cache() override { pool_->clear_prefix_cache(); }
  void check_invariants(bool complete) const override;

 protected:
  virtual void forget(KvHandle handle) = 0;  // forgets a sequence whose references are released
  // Calls check(table, tokens) for each sequence. `table`: the blocks of its room, or all that it was given.
  virtual void check_each(
      const std::function<void(std::span<const int32_t> table, const SequenceTokens& of)>& check) const = 0;
  virtual void count_references(std::vector<int32_t>& references) const;  // adds those of this memory
  // The pool's statistics as this memory's owner should see them.
  virtual KvStats pool_stats() const { return pool_->stats(); }
  // True if the unused part of a block is reserved for tokens to come (contiguous, slots). False: it is wasted because
  // blocks are not smaller.
  virtual bool reserves() const { return false; }
  void check_length(int tokens) const;  // of one sequence, against options.max_sequence_tokens
  // Counts n more tokens, whose KV is in place. Requires: there is room for them.
  void add_written(SequenceTokens& of, std::span<const int32_t> table, size_t n);
  // Copies the first n_tokens of one block to another. The copy is complete on return, so the source may be given up.
  void copy_tokens(int32_t to_block, int32_t from_block, int n_tokens);

  const std::shared_ptr<KvPool> pool_;
  const KvOptions options_;
  DeviceQueue& queue_;
  std::vector<Copy> copies_;                  // reused
  HandleTable<std::vector<int32_t>> leases_;  // the blocks of each lease
  // Written by the owner's thread, read by any thread.
  std::atomic<int64_t> query_tokens_{0}, hit_tokens_{0}, evictions_{0}, cow_copies_{0};
};

// Adds the scheme's own struct of a sequence: SequenceTokens and whatever else the scheme stores. Its clear() keeps its
// memory. A scheme's destructor releases its sequences' references.
template <class Sequence>
class Pooled : public PooledMemory {
 public:
  using PooledMemory::PooledMemory;
  KvHeld held(KvHandle handle) const override {
    const Sequence& s = sequences_[handle];
    return {table_of(s), s.written, 0, tail_is_shared(s)};
  }

 protected:
  virtual std::span<const int32_t> table_of(const Sequence& sequence) const = 0;
  virtual bool tail_is_shared(const Sequence&) const { return false; }
  virtual void check_sequence(const Sequence& sequence) const = 0;
  void forget(KvHandle handle) override { sequences_.remove(handle); }
  void check_each(const std::function<void(std::span<const int32_t>, const SequenceTokens&)>& check) const override {
    sequences_.for_each([&](const Sequence& s) {
      check(table_of(s), s);
      check_sequence(s);
    });
  }

  HandleTable<Sequence> sequences_;
};

// Functions for the table rows of schemes whose block is simply tokens in memory.
size_t bytes_of_tokens(const KvOptions& options, int tokens);
Status nothing_more(const KvOptions& options);  // asks nothing more of the options
Result<std::shared_ptr<KvPool>> make_blocks(const PoolPlan& plan, bool prefix_index);

}  // namespace xpyd::allocator

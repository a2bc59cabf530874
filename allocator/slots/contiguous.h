// contiguous: one slot of the maximum length per sequence, taken when it starts: what PagedAttention was written
// against (SOSP'23, section 3.1, "Orca (Max)"). Plain addresses, and up to max - length tokens wasted.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

#include "allocator/pool/block_pool.h"
#include "allocator/pool/pooled.h"

namespace xpyd::allocator {

// A slot is a block of its pool.
class ContiguousMemory : public PooledMemory {
 public:
  ContiguousMemory(std::shared_ptr<KvPool> pool, const KvOptions& options, const char* name)
      : PooledMemory(std::move(pool), options, name), blocks_(dynamic_cast<BlockPool&>(*pool_)) {
    XPYD_CHECK(options.max_sequence_tokens == layout().block_tokens);
  }

  Result<KvReservation> reserve(std::span<const int32_t>, uint64_t) override {
    const KvHandle handle = add();
    if (handle == kNoKv) return no_slot();
    return KvReservation{handle, 0};
  }

  int probe(std::span<const int32_t>, uint64_t) const override { return 0; }

  bool append(KvHandle handle, int n_tokens) override {
    Sequence& s = sequences_[handle];
    XPYD_CHECK(n_tokens >= 0);
    check_length(s.written + n_tokens);
    s.room = std::max(s.room, s.written + n_tokens);
    return true;
  }

  void written(KvHandle handle, std::span<const int32_t> tokens) override {
    Sequence& s = sequences_[handle];
    add_written(s, s.table, tokens.size());
  }

  void trim(KvHandle handle) override {
    Sequence& s = sequences_[handle];
    s.room = s.written;
  }

  Result<KvHandle> fork(KvHandle handle) override {
    trim(handle);
    KvHandle child_handle = add();
    if (child_handle == kNoKv) return no_slot();
    const Sequence& parent = sequences_[handle];
    Sequence& child = sequences_[child_handle];
    copy_tokens(child.table[0], parent.table[0], parent.written);
    child.written = child.room = parent.written;
    pool_->set_written(child.table, child.written);
    return child_handle;
  }

  KvHandle adopt(KvHandover handover, std::span<const int32_t> tokens, uint64_t) override {
    const KvHandle handle = add_adopted(handover, tokens);
    XPYD_CHECK(handle == kNoKv || handover.blocks.size() == 1);
    return handle;
  }

  KvView view(KvHandle handle, int rank) const override {
    return {base(rank), &places().layout(rank), nullptr, slot_of(handle)};
  }

  bool tail_shared(KvHandle) const override { return false; }

 protected:
  static Error no_slot() { return {ErrorCode::unavailable, "no free KV slot"}; }
  int32_t slot_of(KvHandle handle) const { return sequences_[handle].table[0]; }
  // A sequence of no tokens in a slot of its own. kNoKv: there is none.
  virtual KvHandle add() {
    const KvHandle handle = sequences_.add();
    int64_t evictions = 0;
    if (blocks_.allocate(1, sequences_[handle].table, evictions)) return handle;
    sequences_.remove(handle);
    return kNoKv;
  }
  bool reserves() const override { return true; }
  void check_sequence(const Sequence& s) const override { XPYD_CHECK(s.table.size() == 1); }

  BlockPool& blocks_;
};

// The row of a scheme whose blocks are such slots.
KvScheme scheme_of_slots(const char* name, const char* source, decltype(KvScheme::make) make);

}  // namespace xpyd::allocator

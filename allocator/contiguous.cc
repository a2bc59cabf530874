// contiguous: one slot of the maximum length per sequence, taken when it starts: what
// PagedAttention was written against (SOSP'23, section 3.1, "Orca (Max)"). Plain addresses, and up
// to max - length tokens wasted.
#include <utility>

#include "allocator/pooled.h"

namespace xpyd {
namespace {

Error no_slot() { return {ErrorCode::unavailable, "no free KV slot"}; }

class ContiguousMemory final : public PooledMemory {
 public:
  ContiguousMemory(std::shared_ptr<BlockPool> pool, const KvOptions& options)
      : PooledMemory(std::move(pool), options) {
    XPYD_CHECK(options.max_sequence_tokens == layout().block_tokens);
  }

  const char* name() const override { return "contiguous"; }

  Result<KvReservation> reserve(std::span<const int32_t>, uint64_t) override {
    KvHandle handle = add();
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
    XPYD_CHECK(s.written + int64_t(tokens.size()) <= s.room, "written without room");
    s.written += int(tokens.size());
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
    return child_handle;
  }

  KvHandle adopt(KvHandover handover, std::span<const int32_t> tokens, uint64_t) override {
    XPYD_CHECK(int(tokens.size()) >= handover.tokens && handover.blocks.size() == 1);
    KvHandle handle = kNoKv;
    add_adopted(handover, handle);
    return handle;
  }

  KvView view(KvHandle handle) const override {
    return {pool_->data(), &layout(), nullptr, sequences_[handle].table[0]};
  }

  bool tail_shared(KvHandle) const override { return false; }

 private:
  KvHandle add() {
    KvHandle handle = sequences_.add();
    int64_t evictions = 0;
    if (pool_->allocate(1, sequences_[handle].table, evictions)) return handle;
    sequences_.remove(handle);
    return kNoKv;
  }

  void check_sequence(const Sequence& s) const override { XPYD_CHECK(s.table.size() == 1); }
};

}  // namespace

std::unique_ptr<KvMemory> make_contiguous(std::shared_ptr<BlockPool> pool,
                                          const KvOptions& options) {
  return std::make_unique<ContiguousMemory>(std::move(pool), options);
}

}  // namespace xpyd

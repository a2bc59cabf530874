#include "allocator/block_source.h"

#include <string>
#include <utility>

#include "allocator/block_ledger.h"

namespace xpyd::allocator {
namespace {

class FreeList final : public BlockSource {
 public:
  explicit FreeList(int n_blocks) : free_(size_t(n_blocks)) {
    for (int i = 0; i < n_blocks; ++i) free_[size_t(i)] = n_blocks - 1 - i;
  }
  void claim(int n, std::vector<int32_t>& out) override {
    for (; n > 0 && !free_.empty(); --n) {
      out.push_back(free_.back());
      free_.pop_back();
    }
  }
  void release(int32_t block) override { free_.push_back(block); }
  int count_free() const override { return int(free_.size()); }
  void check_invariants(std::span<const char> held) const override {
    std::vector<char> free(held.size(), 0);
    for (int32_t block : free_) XPYD_CHECK(!free[size_t(block)]++, "free list");
    for (size_t block = 0; block < held.size(); ++block) XPYD_CHECK(free[block] != held[block]);
  }

 private:
  std::vector<int32_t> free_;  // the next one last
};

class LedgerSource final : public BlockSource {
 public:
  LedgerSource(std::unique_ptr<BlockLedger> ledger, int share) : ledger_(std::move(ledger)), share_(share) {
    XPYD_CHECK(ledger_->slot() >= 0 && share > 0);
  }
  void claim(int n, std::vector<int32_t>& out) override { ledger_->claim(n, out); }
  void release(int32_t block) override { ledger_->release(block); }
  int count_free() const override {
    if (const uint64_t now = ledger_->changes(); now != counted_at_) {
      counted_at_ = now;
      free_ = ledger_->count_free();
    }
    return free_;
  }
  void check_invariants(std::span<const char> held) const override {
    for (size_t block = 0; block < held.size(); ++block)
      XPYD_CHECK(ledger_->holds(int32_t(block)) == bool(held[block]), "block " + std::to_string(block));
  }
  int share() const override { return share_; }
  int member() const override { return ledger_->slot(); }
  uint32_t generation(int32_t block) const override { return ledger_->generation(block); }
  bool alone(int32_t block) const override { return ledger_->holders(block) == uint32_t{1} << ledger_->slot(); }
  bool recycle(int32_t block) override { return ledger_->recycle(block); }
  bool adopt(int32_t block, uint32_t generation, int giver) override {
    return giver < BlockLedger::kMembers && ledger_->share(block, generation, giver);
  }

 private:
  const std::unique_ptr<BlockLedger> ledger_;
  const int share_;
  // Free blocks, counted when its changes() were so many.
  mutable uint64_t counted_at_ = ~uint64_t{0};
  mutable int free_ = 0;
};

}  // namespace

std::unique_ptr<BlockSource> make_free_list(int n_blocks) { return std::make_unique<FreeList>(n_blocks); }

std::unique_ptr<BlockSource> make_ledger_source(std::unique_ptr<BlockLedger> ledger, int share) {
  return std::make_unique<LedgerSource>(std::move(ledger), share);
}

}  // namespace xpyd::allocator

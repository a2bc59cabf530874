// paged: PagedAttention (Kwon et al., SOSP'23, section 4). A sequence has a table of small blocks. Blocks have
// reference counts and are copied on write. The prefix cache is vLLM V1's (chained hashes of full blocks, lazy LRU
// eviction), or SGLang's, to the token (radix_tree.h).
#include <algorithm>
#include <utility>

#include "allocator/pool/block_pool.h"
#include "allocator/pool/pooled.h"

namespace xpyd::allocator {
namespace {

int blocks_for(int tokens, int block_tokens) { return (tokens + block_tokens - 1) / block_tokens; }

struct PagedSequence : SequenceTokens {
  std::vector<int32_t> table;  // its blocks, one reference each
  int reserved = 0;            // blocks reserved for it
  bool maybe_shared = false;   // the block of the next token may have other users
  PrefixChain chain;           // end of the chain of its full blocks
  std::vector<int32_t> tail;   // tokens after the last full block
  void clear() {
    table.clear(), tail.clear();
    written = room = reserved = 0;
    maybe_shared = false, chain = {};
  }
};

class PagedMemory final : public Pooled<PagedSequence>, public KvHandoff {
  using Sequence = PagedSequence;

 public:
  PagedMemory(std::shared_ptr<KvPool> pool, const KvOptions& options)
      : Pooled(std::move(pool), options, "paged", {}, this),
        blocks_(dynamic_cast<BlockPool&>(*pool_)),
        block_tokens_(layout().block_tokens),
        caching_(options.prefix_cache && blocks_.index()) {}

  ~PagedMemory() override {
    sequences_.for_each([this](Sequence& s) { give_back(s), pool_->release(s.table); });
  }

  Result<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt) override {
    const KvHandle handle = add();
    Sequence& s = sequences_[handle];
    s.chain.hash = salt;
    if (caching_) {
      const int hit = blocks_.acquire(tokens, salt, longest_hit(tokens), s.table, s.chain);
      s.written = s.room = own_tail(s, hit);
      const int full = s.written / block_tokens_ * block_tokens_;
      s.tail.assign(tokens.begin() + full, tokens.begin() + s.written);
      query_tokens_.fetch_add(int64_t(tokens.size()), std::memory_order_relaxed);
      hit_tokens_.fetch_add(s.written, std::memory_order_relaxed);
    }
    return KvReservation{handle, s.written};
  }

  int probe(std::span<const int32_t> tokens, uint64_t salt) const override {
    return caching_ ? blocks_.match(tokens, salt, longest_hit(tokens)) : 0;
  }

  bool append(KvHandle handle, int n_tokens) override {
    Sequence& s = sequences_[handle];
    XPYD_CHECK(n_tokens >= 0);
    check_length(s.written + n_tokens);
    bool copy = n_tokens > 0 && tail_is_shared(s);
    int more = blocks_for(s.written + n_tokens, block_tokens_) - int(s.table.size());
    int wanted = std::max(more, 0) + int(copy);
    if (wanted > 0) {
      int64_t evictions = 0;
      const int drawn = std::min(wanted, s.reserved);
      if (!blocks_.allocate(wanted, s.table, evictions, drawn)) return false;
      s.reserved -= drawn;
      evictions_.fetch_add(evictions, std::memory_order_relaxed);
    }
    if (copy) make_tail_private(s);
    s.room = std::max(s.room, s.written + n_tokens);
    return true;
  }

  bool reserve_blocks(KvHandle handle, int n_tokens) override {
    Sequence& s = sequences_[handle];
    check_length(s.written + n_tokens);
    const int more = std::max(0, blocks_for(s.written + n_tokens, block_tokens_) - int(s.table.size())) +
                     int(n_tokens > 0 && tail_is_shared(s)) - s.reserved;
    if (!blocks_.reserve(more)) return false;
    s.reserved += more;
    return true;
  }

  KvHeld held(KvHandle handle) const override {
    KvHeld held = Pooled::held(handle);
    held.reserved = sequences_[handle].reserved;
    return held;
  }

  void free(KvHandle handle) override {
    give_back(sequences_[handle]);
    Pooled::free(handle);
  }

  void commit(KvHandle handle, std::span<const int32_t> tokens) override {
    Sequence& s = sequences_[handle];
    const int before = s.written;
    add_written(s, s.table, tokens.size());
    if (caching_) index_new(s, before, tokens);
  }

  void rollback(KvHandle handle) override {
    Sequence& s = sequences_[handle];
    give_back(s);
    size_t keep = size_t(blocks_for(s.written, block_tokens_));
    pool_->release(std::span<const int32_t>(s.table).subspan(keep));
    s.table.resize(keep);
    s.room = s.written;
  }

  Result<KvHandle> fork(KvHandle handle) override {
    rollback(handle);  // room in a block that becomes shared cannot be used
    const KvHandle child_handle = add();
    Sequence& parent = sequences_[handle];
    Sequence& child = sequences_[child_handle];
    child.table.assign(parent.table.begin(), parent.table.end());
    child.written = child.room = parent.written;
    child.chain = parent.chain;
    child.tail.assign(parent.tail.begin(), parent.tail.end());
    parent.maybe_shared = child.maybe_shared = true;
    blocks_.add_references(child.table);
    return child_handle;
  }

  KvHandover hand_over(KvHandle handle) override {
    rollback(handle);  // unused room is not handed over
    const Sequence& s = sequences_[handle];
    KvHandover handover{s.table, s.written};
    pool_->begin_handover(handover);
    forget(handle);
    return handover;
  }

  KvHandle adopt(KvHandover handover, std::span<const int32_t> tokens, uint64_t salt) override {
    XPYD_CHECK(int(tokens.size()) >= handover.tokens);
    pool_->adopt(handover);
    const KvHandle handle = add();
    Sequence& s = sequences_[handle];
    s.table.assign(handover.blocks.begin(), handover.blocks.end());
    XPYD_CHECK(int(s.table.size()) == blocks_for(handover.tokens, block_tokens_));
    s.written = s.room = handover.tokens;
    s.chain.hash = salt;
    s.maybe_shared = true;  // it may have been forked before the hand-over
    if (caching_) index_new(s, 0, tokens.first(size_t(s.written)));
    return handle;
  }

  void discard(KvHandover handover) override { pool_->discard(handover); }

  KvView view(KvHandle handle, int rank) const override {
    return {base(rank), &places().layout(rank), sequences_[handle].table.data(), 0};
  }

  void check_invariants(bool complete) const override {
    Pooled::check_invariants(complete);
    int sum = 0;
    sequences_.for_each([&sum](const Sequence& s) { sum += s.reserved; });
    const int all = blocks_.stats().reserved_blocks;
    XPYD_CHECK(complete ? sum == all : sum <= all, "sequences have " + std::to_string(sum) + " of " +
                                                       std::to_string(all) + " reserved blocks");
  }

 private:
  std::span<const int32_t> table_of(const Sequence& s) const override { return s.table; }

  KvHandle add() {
    const KvHandle handle = sequences_.add();
    std::vector<int32_t>& table = sequences_[handle].table;
    if (table.capacity() == 0) table.reserve(16);  // so that an empty table has an address
    return handle;
  }

  void give_back(Sequence& s) {
    if (s.reserved > 0) XPYD_CHECK(blocks_.reserve(-std::exchange(s.reserved, 0)));
  }

  // Never includes the last token, because the model must compute its logits.
  static int longest_hit(std::span<const int32_t> tokens) { return std::max(0, int(tokens.size()) - 1); }

  // Prepares the last block of a hit that ends within it. The sequence keeps the block if nobody else can write there
  // and the block holds no more than the hit. Otherwise it copies the rows to a new block. Returns the hit, shortened
  // by those rows if no block is free for the copy.
  int own_tail(Sequence& s, int hit) {
    const int rows = hit % block_tokens_;
    if (rows == 0) return hit;
    const int32_t found = s.table.back();
    if (blocks_.alone(found) && blocks_.filled(found) == rows) return hit;
    s.table.pop_back();
    int64_t evictions = 0;
    const bool fits = blocks_.allocate(1, s.table, evictions);
    if (fits) {
      copy_tokens(s.table.back(), found, rows);
      pool_->set_written({&s.table.back(), 1}, rows);
      evictions_.fetch_add(evictions, std::memory_order_relaxed);
      cow_copies_.fetch_add(1, std::memory_order_relaxed);
    }
    pool_->release({&found, 1});  // only after the copy, so that nobody overwrites it during the copy
    return fits ? hit : hit - rows;
  }

  // A full block is never written again, so only a partly written block can need a copy. Once its last other user has
  // gone it stays private, because only a fork of this sequence could share it again.
  bool tail_is_shared(const Sequence& s) const override {
    return s.maybe_shared && s.written % block_tokens_ != 0 &&
           blocks_.users(s.table[size_t(s.written / block_tokens_)]) > 1;
  }

  // Copy-on-write (SOSP'23, section 4.4). Requires: the last block of the table is the new one.
  void make_tail_private(Sequence& s) {
    int32_t fresh = s.table.back();
    s.table.pop_back();
    int32_t& shared = s.table[size_t(s.written / block_tokens_)];
    copy_tokens(fresh, shared, s.written % block_tokens_);
    pool_->set_written({&fresh, 1}, s.written % block_tokens_);
    pool_->release({&shared, 1});  // only after the copy, so that nobody overwrites it during the copy
    shared = fresh;
    s.maybe_shared = false;
    cow_copies_.fetch_add(1, std::memory_order_relaxed);
  }

  // The KV of tokens [before, before + tokens.size()) is in place. Indexes the blocks that are full now; a tree also
  // takes the tokens of a partly full one.
  void index_new(Sequence& s, int before, std::span<const int32_t> tokens) {
    if (tokens.empty()) return;
    size_t bt = size_t(block_tokens_), block = size_t(before) / bt;
    std::span<const int32_t> table = s.table;
    if (!s.tail.empty()) {
      size_t n = std::min(bt - s.tail.size(), tokens.size());
      s.tail.insert(s.tail.end(), tokens.begin(), tokens.begin() + ptrdiff_t(n));
      tokens = tokens.subspan(n);
      blocks_.insert(s.tail, table.subspan(block, 1), s.chain);
      if (s.tail.size() < bt) return;
      s.tail.clear(), ++block;
    }
    const size_t full = tokens.size() / bt;
    if (!tokens.empty()) blocks_.insert(tokens, table.subspan(block, (tokens.size() + bt - 1) / bt), s.chain);
    tokens = tokens.subspan(full * bt);
    s.tail.assign(tokens.begin(), tokens.end());
  }

  void check_sequence(const Sequence& s) const override {
    XPYD_CHECK(int(s.table.size()) >= blocks_for(s.room, block_tokens_) && s.reserved >= 0);
    if (caching_) XPYD_CHECK(int(s.tail.size()) == s.written % block_tokens_);
    if (s.written % block_tokens_ == 0) return;
    int32_t tail_block = s.table[size_t(s.written / block_tokens_)];
    XPYD_CHECK(blocks_.indexed_tokens(tail_block) <= s.written % block_tokens_,
               "tokens that will be written are found");
    XPYD_CHECK(s.maybe_shared || blocks_.users(tail_block) == 1, "append would write into a shared block");
  }

  BlockPool& blocks_;
  const int block_tokens_;
  const bool caching_;
};

}  // namespace

KvScheme paged_scheme() {
  return {.name = "paged",
          .source = "SOSP'23 (PagedAttention) section 4; vLLM V1 prefix cache",
          .unit = "block",
          .block_tokens = [](const KvOptions& o) { return o.block_tokens; },
          .block_bytes = [](const KvOptions& o) { return bytes_of_tokens(o, o.block_tokens); },
          .check = nothing_more,
          .make_pool = [](const PoolPlan& plan) { return make_blocks(plan, plan.of_ranks[0].prefix_cache); },
          .make = [](std::shared_ptr<KvPool> pool, const KvOptions& o) -> std::unique_ptr<KvMemory> {
            return std::make_unique<PagedMemory>(std::move(pool), o);
          },
          .prefix_index = true};
}

}  // namespace xpyd::allocator

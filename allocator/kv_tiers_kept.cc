// KvTiers whose disk outlives its process: what its index is told, and what is read of it (disk_index.h).

#include <algorithm>
#include <utility>

#include "allocator/kv_tiers.h"
#include "allocator/prefix_index.h"
#include "base/log.h"

namespace xpyd::allocator {

void KvTiers::free_disk_slot(int slot) {
  free_disk_.push_back(slot);
  if (disk_index_) disk_index_->drop(slot);
}

bool KvTiers::flush_index() {
  if (!disk_index_ || writes_off_) return true;
  const Status written = disk_index_->flush();
  if (!written) disk_failed(written.error().message, false);
  return written.ok();
}

DiskIdentity KvTiers::identity() const {
  const KvShape& s = layout_.shape;
  DiskIdentity identity = options_.disk_identity;
  identity.push_back({"KV dtype", dtype_name(s.dtype)});
  identity.push_back({"KV layout", "token_major, " + std::to_string(s.n_layers) + " layers, " +
                                       std::to_string(s.n_kv_heads) + " heads of " + std::to_string(s.head_dim)});
  identity.push_back({"block", std::to_string(options_.block_tokens) + " tokens"});
  return identity;
}

// With what is on the disk now.
Status KvTiers::rewrite_index() {
  disk_index_.reset();
  auto index = DiskIndex::create(disk_name_->index(), identity());
  if (!index) return index.error();
  std::vector<int32_t> blocks;  // whoever reads it knows by their order which one was used last
  for (int32_t block = 0; block < int32_t(blocks_.size()); ++block)
    if (at(block).is_in(Tier::disk)) blocks.push_back(block);
  std::ranges::stable_sort(blocks, {}, [this](int32_t block) { return at(block).use.last_use; });
  for (const int32_t block : blocks) {
    const Block& b = at(block);
    index.value()->put(b.disk, b.parent < 0, b.uid, b.parent_uid, b.checksum, tokens_at(block));
  }
  if (Status written = index.value()->commit(); !written) return written;
  disk_index_ = std::move(index).value();
  return ok();
}

// What an earlier process has left on the disk is known from here on, parents before those that continue them.
void KvTiers::restore() {
  DiskIndexContents found;
  if (disk_name_) found = read_disk_index(disk_name_->index(), identity(), options_.block_tokens);
  const size_t slots = std::min(size_t(disk_slots_),
                                disk_name_ ? disk_name_->bytes() / DiskFile::padded(layout_.block_bytes()) : 0);
  std::unordered_multimap<uint64_t, size_t> after;  // of found.blocks, by the block before it
  std::vector<std::pair<size_t, int32_t>> next;     // of these, with that block
  for (size_t i = found.blocks.size(); i-- > 0;) {
    const DiskBlock& d = found.blocks[i];
    next_uid_ = std::max(next_uid_, d.uid + 1);
    if (size_t(d.slot) >= slots || d.uid == 0) continue;
    if (d.first) {
      next.push_back({i, -1});
    } else {
      after.emplace(d.parent_uid, i);
    }
  }
  std::vector<bool> used(size_t(disk_slots_), false);
  int restored = 0;
  while (!next.empty()) {
    const auto [i, parent] = next.back();
    next.pop_back();
    const DiskBlock& d = found.blocks[i];
    const uint64_t before = d.first ? d.parent_uid : at(parent).hash;
    const uint64_t hash = prefix_hash(before, d.first, d.tokens.data(), options_.block_tokens);
    if (used[size_t(d.slot)] || index_.contains(key_of(hash))) continue;
    const int32_t block = new_block();
    Block& b = at(block);
    b.uid = d.uid;
    b.parent_uid = d.parent_uid;
    b.parent = parent;
    b.hash = hash;
    b.parent_hash = before;
    b.use = {int64_t(i), 1, parent < 0 ? 0 : at(parent).use.position + 1};
    b.use.entered = int64_t(i);
    b.disk = d.slot;
    b.checksum = d.checksum;
    std::ranges::copy(d.tokens, tokens_.begin() + ptrdiff_t(block) * options_.block_tokens);
    index_[key_of(hash)] = block;
    used[size_t(d.slot)] = true;
    ++restored;
    if (parent >= 0) {
      ++at(parent).children;
      refresh(parent);
    }
    refresh(block);
    for (auto [of, end] = after.equal_range(d.uid); of != end; ++of) next.push_back({of->second, block});
  }
  tick_ += int64_t(found.blocks.size());
  for (int slot = disk_slots_; slot-- > 0;)
    if (!used[size_t(slot)]) free_disk_.push_back(slot);
  if (!disk_name_) return;
  const std::string name = disk_name_->data();
  if (!found.other.empty())
    log_line(LogLevel::warning, "xpyd: %s: %s; it begins empty", name.c_str(), found.other.c_str());
  else if (!found.blocks.empty() || found.cut > 0)
    log_line(LogLevel::info, "xpyd: %s: %d of %zu KV blocks are known again%s", name.c_str(), restored,
             found.blocks.size(), found.cut > 0 ? "; the end of its index was cut off" : "");
  if (Status written = rewrite_index(); !written) disk_failed(written.error().message, false);
}

}  // namespace xpyd::allocator

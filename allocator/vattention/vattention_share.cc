// What sequences of vattention share: a prompt that begins like what another slot holds maps its full rows a second
// time, goes on in the slot if its sequence has ended, or copies (VattentionOptions::share); a fork does the first or
// the last. Nobody has published the three side by side.
#include "allocator/vattention/vattention.h"

namespace xpyd::allocator {

// The idle slot goes on from its first match.tokens tokens. The row in which they end will be
// written to: where others use it, they end with the row before. False: there is no such end.
bool VattentionMemory::take_over(SlotContents::Match& match) {
  const int slot = match.slot, full = full_rows(match.tokens);
  const int own = rows_.unshared_from(slot, full);
  if (own < rows_for(match.tokens)) {
    if (full == 0 || options_.vattention.page_group_bytes % token_bytes_ != 0) return false;
    match.tokens = full * row_tokens_;
  }
  rows_.give_back(slot, own);
  set_busy(slot, rows_for(match.tokens));
  pool_->set_written(rows_.rows(slot).subspan(size_t(full)), match.tokens - full * row_tokens_);
  return true;
}

// Bytes [begin, end) of each plane of a slot, on all ranks.
void VattentionMemory::copy_bytes(int to, int from, size_t begin, size_t end) {
  copies_.clear();
  if (begin == end) return;
  for (int rank = 0; rank < n_ranks(); ++rank) {
    const KvLayout& slots = places().layout(rank);
    for (int p = 0; p < vattention_planes(slots); ++p)
      copies_.push_back({base(rank) + slots.offset(from, p / 2, p % 2, 0, 0) + begin,
                         base(rank) + slots.offset(to, p / 2, p % 2, 0, 0) + begin, end - begin});
  }
  queue_.copy(copies_, true);
  queue_.wait();
}

// The first `tokens` tokens of `donor` in the idle slot, too: full rows by a second mapping (alias), the rest copied.
// Copy-on-write of a row never happens: KV is only appended to, a full row has no byte left to write, and the row of
// the next token is never shared. `room`: tokens that will be asked for next; nothing is begun that they do not fit
// behind. False: no rows, and the slot is empty.
bool VattentionMemory::clone(int slot, int donor, int tokens, int room) {
  const int shared = share_ == KvShare::alias ? full_rows(tokens) : 0;
  const int donor_busy = rows_.busy(donor);
  rows_.set_busy(donor, std::max(donor_busy, rows_for(tokens)));  // nobody reclaims them now
  const KvStats stats = pool_->stats();
  bool done = stats.free + stats.cached >= rows_for(std::max(tokens, room)) - shared;
  if (done) {
    clear(slot);
    if (shared > 0) done = rows_.alias(slot, donor, shared);
    done = done && rows_.grow(slot, rows_for(tokens));
    if (done) {
      rows_.wait(donor, rows_for(tokens));
      copy_bytes(slot, donor, size_t(shared) * options_.vattention.page_group_bytes, size_t(tokens) * token_bytes_);
      pool_->set_written(rows_.rows(slot).subspan(size_t(shared)), tokens - shared * row_tokens_);
    } else {
      set_busy(slot, 0);
      clear(slot);
    }
  }
  rows_.set_busy(donor, donor_busy);
  return done;
}

// A slot that holds match.tokens tokens of what `match` found; -1: it could not be used.
int VattentionMemory::attach(SlotContents::Match& match, int n_tokens) {
  const bool idle = usable(match.slot);
  // Nothing is lost if the donor goes on itself.
  const bool whole = idle && match.tokens == contents_.size(match.slot);
  if (share_ != KvShare::takeover && !whole) {
    const int slot = find_slot(0, match.slot);
    if (slot >= 0 && clone(slot, match.slot, match.tokens, n_tokens)) return slot;
  }
  return idle && take_over(match) ? match.slot : -1;
}

Result<KvHandle> VattentionMemory::fork(KvHandle handle) {
  trim(handle);
  const int written = sequences_[handle].written, donor = sequences_[handle].slot;
  const int slot = find_slot(rows_for(written), -1);
  if (slot < 0 || !clone(slot, donor, written, 0)) return Error{ErrorCode::unavailable, "no free KV slot"};
  if (sharing()) contents_.begin_like(slot, donor);
  return open(slot, written);
}

}  // namespace xpyd::allocator

// Who gives rows back when they run short: idle slots, the longest idle first and from its end;
// then sequences, what they do not need yet (vAttention section 6.1.2).
#include <algorithm>

#include "allocator/vattention/slot_rows.h"

namespace xpyd::allocator {

// The system refuses mappings: those of idle slots are given back, so that the next try may succeed.
void SlotRows::give_back_idle() {
  for (int i; (i = victim(-1, false)) >= 0;) give_back(i, slots_[size_t(i)].busy);
}

bool SlotRows::make_free(int n_rows) {
  for (;;) {
    const KvStats stats = pool_.stats();
    if (stats.free >= n_rows) return true;
    if (stats.free + stats.cached < n_rows) return false;
    const int given = reclaim(n_rows - stats.free, -1, true);
    (void)mapper_.wait(last_release_);                    // a row is free when it is unmapped
    if (given == 0) return pool_.stats().free >= n_rows;  // other memories have them
  }
}

int SlotRows::reclaim(int n_rows, int except, bool live) {
  int given = 0;
  while (given < n_rows) {
    const int i = victim(except, live);
    if (i < 0) break;
    const int has = int(slots_[size_t(i)].rows.size()), gives = std::min(has - slots_[size_t(i)].busy, n_rows - given);
    give_back(i, has - gives);
    given += gives;
  }
  reclaimed_.fetch_add(given, std::memory_order_relaxed);
  return given;
}

// The slot whose rows go next. Of sequences (`live`) only what they do not need yet.
int SlotRows::victim(int except, bool live) const {
  int oldest = -1;
  for (int i = 0; i < int(slots_.size()); ++i) {
    const Slot& slot = slots_[size_t(i)];
    if (i == except || slot.busy == int(slot.rows.size())) continue;
    if (slot.idle_since == kLive && !live) continue;
    if (oldest < 0 || slot.idle_since < slots_[size_t(oldest)].idle_since) oldest = i;
  }
  return oldest;
}

}  // namespace xpyd::allocator

// Prefixes that stay at an instance: pinned by POST /pin_prefix, or, for as long as a tool is expected to take, by a
// request's hint. And the opposite: thoughts that nobody will ask for.
//
// A pin is of what the instance has now and of what it computes later; nothing is computed for its sake. A hard one is
// a sequence that nobody runs, so its blocks are in use; the conductor grants so many that requests still fit beside
// them. The blocks of a soft one go when nothing else can.
//
// Thread safety: the instance's thread.
#pragma once

#include <cstdint>
#include <vector>

#include "allocator/kv_memory.h"
#include "base/clock.h"

namespace xpyd::disagg {

// Conductor -> instance.
struct PinPrefix {
  uint64_t id = 0;  // of whoever asked
  uint64_t salt = 0;
  std::vector<int32_t> tokens;
  bool soft = false;
  double ttl_s = 0;  // from now on; 0: until it is unpinned
};
struct UnpinPrefix {
  uint64_t id = 0;
};
// An answer is over. What its client has said of the KV of prompt and answer.
struct KvHint {
  uint64_t salt = 0;
  std::vector<int32_t> tokens;
  int kept = 0;      // of these: the next turn's prompt does not have what follows
  double ttl_s = 0;  // so long a tool will take, after which the next turn comes; 0: nothing is known
};

namespace pool {

// Seconds on one side, seconds of a whole instance on the other (Continuum's rule, with a time that is told).
struct Pause {
  double reload_s = 0;  // to compute the prefix again,
  double queue_s = 0;   // and to wait for that
  double ttl_s = 0;
  double share = 0;  // of the instance's KV memory that it takes
};
inline bool pays(const Pause& pause) { return pause.reload_s + pause.queue_s > pause.ttl_s * pause.share; }

class PrefixPins {
 public:
  PrefixPins(KvMemory& memory, Clock& clock) : memory_(memory), clock_(clock) {}
  ~PrefixPins() { clear(); }

  void handle(PinPrefix message);
  void handle(const UnpinPrefix& message);
  // `pause`: of the tokens that are kept, whose KV it may be worth to keep.
  void handle(KvHint message, const Pause& pause);
  void tick();
  void clear();
  int hard_blocks() const { return hard_blocks_; }

 private:
  struct Pin {
    PinPrefix of;  // one token more than is to stay: a prefix cache never finds the last
    KvMark mark = KvMark::pinned;
    double until_s = 0;   // Clock; 0: never
    KvHandle kv = kNoKv;  // hard: what stays
    int n = 0;            // blocks of it
    double again_s = 0;   // Clock: there was no room for more; not before then
  };
  void keep(Pin& pin);
  void let_go(Pin& pin);

  KvMemory& memory_;
  Clock& clock_;
  std::vector<Pin> pins_;
  double looked_s_ = 0;  // Clock
  size_t turn_ = 0;      // whose it is to be looked at
  int hard_blocks_ = 0;
};

}  // namespace pool
}  // namespace xpyd::disagg

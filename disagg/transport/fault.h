// fault: any wire, made worse on purpose: posts are late, out of order, lost, cut short or changed on the way. What
// happens to which post is a matter of the seed and of the order of posts alone, so under a virtual clock a run repeats
// itself.
//
//   drop       the post is never heard of again: in flight until its deadline, then failed
//   delay      it begins later, by a time exponentially distributed around this mean
//   reorder    it begins behind the next post, or after a millisecond
//   truncate   its last bytes do not come, and it is done
//   corrupt    one bit of it is another, and it is done
//
// All but the last two are within what transport.h allows. Those break its promises: they are for what checksums must
// catch. `corrupt` reads and posts bytes of its own, in memory of the host and outside of the regions, so
// TransportChoice::make refuses it where the wire needs its regions (rdma) or the KV is a device's.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "disagg/transport/transport.h"

namespace xpyd::disagg {

struct FaultOptions {
  uint64_t seed = 0;
  double drop = 0, reorder = 0, truncate = 0, corrupt = 0;  // probabilities
  double delay_s = 0;                                       // mean
};

struct FaultCounts {
  int64_t dropped = 0, delayed = 0, reordered = 0, truncated = 0, corrupted = 0;
};

std::unique_ptr<KvTransport> make_fault_transport(std::unique_ptr<KvTransport> inner, const FaultOptions& faults,
                                                  const TransportOptions& options);
// What it has done so far. Null: `transport` is no fault transport.
const FaultCounts* fault_counts(const KvTransport& transport);

// A value of --transport: a wire's name, or fault:NAME,KEY=VALUE,… as in fault:tcp,seed=7,drop=0.01,delay=2ms.
struct TransportChoice {
  const TransportRow* row = nullptr;
  std::optional<FaultOptions> faults;
  Result<std::unique_ptr<KvTransport>> make(const TransportOptions& options) const;
};
Result<TransportChoice> parse_transport(std::string_view text);

}  // namespace xpyd::disagg

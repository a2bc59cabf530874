// The fault transport makes any other transport worse on purpose: transfers are late, out of order or lost. The seed
// and the order of the transfers alone decide what happens to which transfer, so a run under a virtual clock repeats
// itself.
//
//   drop       the transfer is lost: it stays in flight until its deadline, then it fails (without one: at once)
//   delay      it begins later, by an exponentially distributed time with this mean
//   reorder    it begins after the next transfer, or after a millisecond
//
// transport.h allows all three.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "disagg/transport/transport.h"

namespace xpyd::disagg {

struct FaultOptions {
  uint64_t seed = 0;
  double drop = 0, reorder = 0;  // probabilities
  double delay_s = 0;            // mean
};

struct FaultCounts {
  int64_t dropped = 0, delayed = 0, reordered = 0;
};

std::unique_ptr<KvTransport> make_fault_transport(std::unique_ptr<KvTransport> inner, const FaultOptions& faults,
                                                  const TransportOptions& options);
// Returns what has happened so far. Null: `transport` is not a fault transport.
const FaultCounts* fault_counts(const KvTransport& transport);

// A value of --transport: a transport's name, or fault:NAME,KEY=VALUE,… as in fault:tcp,seed=7,drop=0.01,delay=2ms.
struct TransportChoice {
  const TransportRow* row = nullptr;
  std::optional<FaultOptions> faults;
  Result<std::unique_ptr<KvTransport>> make(const TransportOptions& options) const;
};
Result<TransportChoice> parse_transport(std::string_view text);

}  // namespace xpyd::disagg

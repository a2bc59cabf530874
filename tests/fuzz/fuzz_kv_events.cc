// Bytes that claim to be KV events -> what they say, or nothing; and what we say of any changes -> the same changes.
// The first byte chooses.

#include <cstdint>
#include <cstring>
#include <map>
#include <string>

#include "disagg/pool/kv_event_feed.h"
#include "disagg/pool/kv_events.h"

namespace xpyd::testing {
namespace {

using Blocks = std::vector<std::pair<bool, uint64_t>>;  // came, hash

void fuzz_changes(std::string_view input) {
  std::vector<CacheChange> changes;
  std::vector<int32_t> tokens;
  Blocks said, heard;
  for (; input.size() >= 3; input.remove_prefix(3)) {
    const bool came = input[0] & 1;
    CacheChange change{.hash = uint64_t(uint8_t(input[1])) << (input[0] & 56), .tier = Tier((input[0] >> 1 & 3) % 3)};
    if (came) change.parent = uint8_t(input[2]), change.n_tokens = 1 + (input[2] & 1), change.first = input[2] & 2;
    tokens.resize(tokens.size() + size_t(change.n_tokens), input[2]);
    changes.push_back(change);
    said.emplace_back(came, change.hash);
  }
  const auto events = read_kv_events(pack_kv_events(1, !changes.empty(), changes, tokens, 1));
  XPYD_CHECK(events.has_value());
  for (const HeardEvent& event : *events) {
    for (uint64_t hash : event.report.stored) heard.emplace_back(true, hash);
    for (uint64_t hash : event.report.removed) heard.emplace_back(false, hash);
  }
  XPYD_CHECK(said == heard);
}

}  // namespace
}  // namespace xpyd::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] & 1)
    xpyd::testing::fuzz_changes(input);
  else
    (void)xpyd::disagg::read_kv_events(input);
  return 0;
}

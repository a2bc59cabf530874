#include "allocator/slots/contiguous.h"

namespace xpyd::allocator {

KvScheme scheme_of_slots(const char* name, const char* source, decltype(KvScheme::make) make) {
  return {.name = name,
          .source = source,
          .unit = "slot",
          .block_tokens = [](const KvOptions& o) { return o.max_sequence_tokens; },
          .block_bytes = [](const KvOptions& o) { return bytes_of_tokens(o, o.max_sequence_tokens); },
          .check = nothing_more,
          .make_pool = [](const PoolPlan& plan) { return make_blocks(plan, false); },
          .make = make,
          .contiguous = true,
          .whole_slots = true};
}

KvScheme contiguous_scheme() {
  return scheme_of_slots("contiguous", "SOSP'23 (PagedAttention) section 3.1: Orca (Max)",
                         [](std::shared_ptr<KvPool> pool, const KvOptions& o) -> std::unique_ptr<KvMemory> {
                           return std::make_unique<ContiguousMemory>(std::move(pool), o, "contiguous");
                         });
}

}  // namespace xpyd::allocator

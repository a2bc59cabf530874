// TransferPlan: which bytes cross from one instance's KV to another's. Layouts and block sizes may differ on the two
// sides; the result is a list of copies, coalesced as far as both layouts allow. Its length is the number of
// descriptors of the transfer: about 2 * layers * blocks for layer_major, blocks for token_major.
#pragma once

#include <cstddef>
#include <vector>

#include "allocator/kv_copy.h"

namespace xpyd::disagg {

struct TransferPlan {
  std::vector<Copy> copies;
  size_t bytes = 0;
};

void plan_transfer(const KvView& source, const KvView& destination, const KvRegion& region, TransferPlan& plan);

}  // namespace xpyd::disagg

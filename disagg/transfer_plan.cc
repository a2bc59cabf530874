#include "disagg/transfer_plan.h"

namespace xpyd::disagg {

void plan_transfer(const KvView& source, const KvView& destination, const KvRegion& region, TransferPlan& plan) {
  plan.copies.clear();
  plan.bytes = add_copies(source, destination, region, plan.copies);
}

}  // namespace xpyd::disagg

// Placement policies of published routers, with the constants that they ship with. They read the same view as the
// server's own policies (disagg/conductor/placement.h), and only simulations and replays of a log use them.
//
// Thread safety: plain functions.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "disagg/conductor/placement.h"

namespace xpyd::disagg {

std::span<const PlacementPolicy> published_routers();
// Finds a policy of the server or a published router. Null: no such policy.
const PlacementPolicy* find_router(std::string_view name);
std::string router_names();  // of both, with | between them

// Returns the share of the tokens to be computed that another placement would have found in a cache: lost / (novel +
// lost). `lost` is the best hit minus the chosen instance's; `novel` is what no instance has (Dynamo, KV locality
// metrics). Returns 0 if nothing is computed.
double regret_ratio(const ClusterView& view, int prefill);

}  // namespace xpyd::disagg

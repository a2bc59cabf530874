#include "disagg/pool/fetch_policy.h"

#include "base/table.h"

namespace xpyd::disagg {
namespace {

constexpr FetchPolicy kPolicies[] = {
    {"never", nullptr, 0, "a prefix stays where it was computed"},
    {"always", [](const FetchView&) { return true; }, 0, "vLLM, MooncakeStoreConnector.get_num_new_matched_tokens"},
    {"cost", [](const FetchView& view) { return fetch_seconds(view) < view.saved_s; }, 2,
     "own rule; Mooncake (FAST '25) section 4 makes this comparison between instances, not for one"},
};

}  // namespace

std::span<const FetchPolicy> fetch_policies() { return kPolicies; }
const FetchPolicy* find_fetch_policy(std::string_view name) { return find_row(kPolicies, name); }

}  // namespace xpyd::disagg

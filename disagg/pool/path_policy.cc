#include "disagg/pool/path_policy.h"

#include "base/table.h"

namespace xpyd::disagg {
namespace {

constexpr PathPolicy kPaths[] = {
    {"direct", nullptr, "P reads by itself"},
    {"dual", [](const PathView& v) { return v.relay_queue_s + v.relay_s + v.hop_s < v.direct_queue_s + v.direct_s; },
     "DualPath (arXiv 2602.21548): the side whose queue of reads is shorter; ours adds the hop"},
    {"relay", [](const PathView&) { return true; }, "ours: by way of D wherever that can be"},
};

}  // namespace

std::span<const PathPolicy> path_policies() { return kPaths; }
const PathPolicy* find_path_policy(std::string_view name) { return find_row(kPaths, name); }

}  // namespace xpyd::disagg

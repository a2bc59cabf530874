#include "batch/drafter.h"

#include "base/table.h"
#include "batch/ngram.h"

namespace xpyd::batch {
namespace {

constexpr DrafterRow kDrafters[] = {
    {"off", nullptr, "one token a step"},
    {"ngram", make_ngram_drafter,
     "what followed where the sequence's last tokens have stood before: prompt lookup decoding (Saxena 2023)"},
};

}  // namespace

std::span<const DrafterRow> drafters() { return kDrafters; }
const DrafterRow* find_drafter(std::string_view name) { return find_row(kDrafters, name); }

}  // namespace xpyd::batch

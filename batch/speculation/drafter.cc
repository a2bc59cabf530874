#include "batch/drafter.h"

#include "base/table.h"
#include "batch/speculation/mtp.h"
#include "batch/speculation/ngram.h"

namespace xpyd::batch {
namespace {

constexpr DrafterRow kDrafters[] = {
    {"off", nullptr, "one token per step"},
    {"ngram", [](const DrafterParts&) { return make_ngram_drafter(); },
     "the tokens that followed the last occurrence of the sequence's last tokens: prompt lookup decoding (Saxena "
     "2023)"},
    {"mtp", make_head_drafter,
     "the model's own multi-token prediction head, whose KV is one more layer (DeepSeek-V3, section 2.2)", true},
};

}  // namespace

std::span<const DrafterRow> drafters() { return kDrafters; }
const DrafterRow* find_drafter(std::string_view name) { return find_row(kDrafters, name); }

}  // namespace xpyd::batch

// THE options table: every option of every subcommand, in one place. Names are a
// contract.
#pragma once

#include <span>

#include "base/options.h"

namespace xpyd {

std::span<const OptionRow> option_table();

// What the rows cannot say one by one: combinations that make no sense. `group` as in the table.
Status check_options(const Options& options, std::string_view group);

}  // namespace xpyd

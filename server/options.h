// THE options table: every option of every subcommand, in one place. Names are a contract.
#pragma once

#include <span>

#include "base/options.h"

namespace xpyd::server {

std::span<const OptionRow> option_table();

// What the rows cannot say one by one: combinations that make no sense. `group` as in the table.
Status check_options(const Options& options, std::string_view group);
// What was given and only counts with another option that was not, a line each: the help of such a
// row begins with "--processes: " or "--device cuda: ".
std::vector<std::string> without_effect(const Options& options);

}  // namespace xpyd::server

// How much prompts repeat: the radix-tree metric of the xPyD notes, and beside it what an unlimited
// prefix cache would have found.
//
// All prompts form a radix tree whose nodes count the prompts that pass through. Nodes counted less
// than `min_count` times are cut off; each leaf that remains is a maximal prefix that many share,
// and counts if it is longer than `min_length`.
//   R_leaf   such leaves / prompts: how many different things are worth keeping
//   R_conv   prompts through them / prompts: how many would find one
// Prompts that share an inner node but part below it are in neither, and a leaf shared by a
// thousand weighs in R_leaf as much as one shared by two. So beside them:
//   reuse    what the prompts before, in the file's order, had in common with each, / everything
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace xpyd::server {

struct PrefixInput {
  // A prompt is a string of units, each unit_bytes long: 1 byte of UTF-8 of a conversation, or the 8 of one hash id of
  // a trace, which stands for unit_length tokens (the last one for what is left).
  std::vector<std::string> prompts;
  std::vector<int64_t> lengths;  // of each, in what `length_unit` says
  int unit_bytes = 1, unit_length = 1;
  std::string length_unit = "bytes";
};

// ShareGPT's JSON array (all turns of a conversation, one after another) or Mooncake's JSON lines.
// Errors name the file and the line.
Result<PrefixInput> read_prefix_input(const std::string& path);

struct SharedPrefix {
  int64_t count = 0, length = 0;
};
struct PrefixStats {
  int64_t prompts = 0, total_length = 0, total_units = 0;
  int64_t leaves = 0;
  double r_leaf = 0, r_conv = 0;
  double unit_reuse = 0;           // of units (blocks of a trace)
  double length_reuse = 0;         // weighted by tokens (or bytes)
  std::vector<SharedPrefix> most;  // the leaves that most prompts pass, at most ten
};

// Before: min_count >= 2, min_length >= 0 (in the input's length unit).
PrefixStats prefix_stats(const PrefixInput& input, int64_t min_count, int64_t min_length);

}  // namespace xpyd::server

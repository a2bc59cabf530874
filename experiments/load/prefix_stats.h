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
// Memory: the prompts, and up to 48 bytes and a string's head for each (sorted prompts stand for the tree).
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/text/tokenizer.h"

namespace xpyd::server {

struct PrefixInput {
  // A prompt is a string of units, each unit_bytes long: 1 byte of UTF-8 of a conversation, the 4 of a token, or the 8
  // of a block's hash, which stands for unit_length tokens (the last one for what is left).
  std::vector<std::string> prompts;
  std::vector<int64_t> lengths;  // of each, in what `length_unit` says
  int unit_bytes = 1, unit_length = 1;
  std::string length_unit = "bytes";
  std::function<std::string(std::string_view units)> text;  // of such units; null: only their hashes are known
};

// Texts: JSON objects, as an array or a line each, of ShareGPT ("conversations"), LMSYS-chat ("conversation"),
// dolly-15k ("instruction", "context", "response"): all turns one after another; or a "prompt". Blocks: Mooncake's or
// Bailian's JSON lines, or a folder of WEKA's sessions. Which it is, its first record says. Errors name the file and
// the line.
Result<PrefixInput> read_prefix_input(const std::string& path);

// Texts by tokens instead, or by blocks of so many; the tokenizer stays.
PrefixInput in_tokens(const PrefixInput& texts, const Tokenizer& tokenizer, int block_tokens);

struct SharedPrefix {
  int64_t count = 0, length = 0;
  size_t prompt = 0, units = 0;  // the first units of a prompt that has it
};
struct PrefixStats {
  int64_t prompts = 0, total_length = 0, total_units = 0;
  int64_t leaves = 0;
  double r_leaf = 0, r_conv = 0;
  double unit_reuse = 0;           // of units (blocks of a trace)
  double length_reuse = 0;         // weighted by tokens (or bytes)
  double mean_repeated = 0;        // length of what a prompt has in common with one before, of those that have anything
  std::vector<int64_t> repeated;   // [prompts], … of each, in units
  std::vector<SharedPrefix> most;  // the leaves that most prompts pass, at most so many
};

// Before: min_count >= 2, min_length >= 0 (in the input's length unit).
PrefixStats prefix_stats(const PrefixInput& input, int64_t min_count, int64_t min_length, size_t most = 10);

}  // namespace xpyd::server

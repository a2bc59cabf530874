// How much prompts repeat: the radix-tree metric of the xPyD notes, and the hit rate of an unlimited prefix cache.
//
// All prompts form a radix tree whose nodes count the prompts that pass through them. Nodes with fewer than `min_count`
// prompts are cut off. Each remaining leaf is a maximal prefix that many prompts share, and counts if it is longer than
// `min_length`.
//   R_leaf   such leaves / prompts: how many different prefixes are worth keeping
//   R_conv   prompts through them / prompts: how many prompts would find one
// Two prompts that share an inner node but part below it are in neither figure. R_leaf also weighs a leaf of a thousand
// prompts the same as a leaf of two. So a third figure stands beside them:
//   reuse    the longest prefix that each prompt shares with an earlier one of the file, summed / everything
//
// Memory: the prompts, plus at most 48 bytes and a string header for each. Sorted prompts stand for the tree.
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
  // A prompt is a string of units of unit_bytes each: a byte of UTF-8 (1), a token id (4), or the hash of a block (8).
  // A block stands for unit_length tokens, and the last block of a prompt for the rest.
  std::vector<std::string> prompts;
  std::vector<int64_t> lengths;  // of each prompt, in `length_unit`
  int unit_bytes = 1, unit_length = 1;
  std::string length_unit = "bytes";
  std::function<std::string(std::string_view units)> text;  // the text of units; null: only hashes are known
};

// Reads a file in one of these forms; its first record decides which. Texts: an array or lines of JSON objects of
// ShareGPT ("conversations"), LMSYS-chat ("conversation"), dolly-15k ("instruction", "context", "response"), with all
// turns joined; or with a "prompt". Blocks: JSON lines of Mooncake or Bailian, or a folder of WEKA's sessions. Errors
// name the file and the line.
Result<PrefixInput> read_prefix_input(const std::string& path);

// The texts in units of tokens, or of blocks of block_tokens tokens. `tokenizer` must outlive the result.
PrefixInput in_tokens(const PrefixInput& texts, const Tokenizer& tokenizer, int block_tokens);

struct SharedPrefix {
  int64_t count = 0, length = 0;
  size_t prompt = 0, units = 0;  // a prompt that has this prefix, and the prefix's units
};
struct PrefixStats {
  int64_t prompts = 0, total_length = 0, total_units = 0;
  int64_t leaves = 0;
  double r_leaf = 0, r_conv = 0;
  double unit_reuse = 0;     // by units (blocks of a trace)
  double length_reuse = 0;   // weighted by tokens (or bytes)
  double mean_repeated = 0;  // mean length of the prefix shared with an earlier prompt, over prompts that share one
  std::vector<int64_t> repeated;   // [prompts], units that each shares with an earlier prompt
  std::vector<SharedPrefix> most;  // the leaves that most prompts pass, at most `most` of them
};

// Requires: min_count >= 2, min_length >= 0 (in the input's length unit).
PrefixStats prefix_stats(const PrefixInput& input, int64_t min_count, int64_t min_length, size_t most = 10);

}  // namespace xpyd::server

// xpyd tour --allocator vattention: vAttention step by step. Two sequences come and grow, page groups appear behind
// their addresses, one ends, and its groups stay for the next one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace xpyd::server {

// What is so after an event.
struct WalkStep {
  std::string event;
  int slot = -1;                         // of the event's sequence; -1: it has none
  int rows_in_use = 0, rows_mapped = 0;  // of the pool; the others have no memory behind an address
  int64_t maps = 0, unmaps = 0;          // page groups, since the beginning
  std::vector<std::string> slots;        // drawn: # a row in use, o a row that stays mapped
};

// The memory is the server's own, and maps when a row is needed. Two layers have 2 x 2 tensors; a token of one is 512
// bytes and a page group 4 KiB, so a row of 4 groups, one in each tensor, holds 8 tokens. The pool has 6 rows, for 3
// sequences of at most 64 tokens.
std::vector<WalkStep> vattention_walk();

int vattention_tour();  // prints it

}  // namespace xpyd::server

// xpyd tour --allocator vattention: vAttention step by step. Two sequences arrive and grow, and page groups are mapped
// behind their addresses. One ends, and its page groups stay mapped for the next one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace xpyd::server {

// The state after an event.
struct TourStep {
  std::string event;
  int slot = -1;                         // of the event's sequence; -1: it has none
  int rows_in_use = 0, rows_mapped = 0;  // of the pool; other rows have no memory behind their addresses
  int64_t maps = 0, unmaps = 0;          // page groups, since the start
  std::vector<std::string> slots;        // drawn: # a row in use, o a row that stays mapped
};

// Runs the events on the server's own memory, which maps a page-group row when it is needed. Two layers have 2 x 2
// tensors. A token of one tensor is 512 bytes and a page group 4 KiB, so a row of 4 groups, one in each tensor, holds 8
// tokens. The pool has 6 rows, for 3 sequences of at most 64 tokens.
std::vector<TourStep> vattention_steps();

int vattention_tour();  // prints the steps

}  // namespace xpyd::server

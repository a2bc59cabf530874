// What the two ends of an nccl link tell each other, as bytes. The poster calls; `ask`, `go`,
// `drop` and `renew` are its messages, the others the owner's. Everything here comes from outside:
// counts and lengths are checked, and a message that is not exactly right is refused.
//
// A body (side_channel.h) begins with its kind. Numbers are little endian.
//
// Thread safety: functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "disagg/transport/nccl_api.h"
#include "disagg/transport/side_channel.h"
#include "disagg/transport/transport.h"

namespace xpyd::nccl {

// Of one group: what is between ncclGroupStart and ncclGroupEnd. NCCL has had limits of 2,048 calls
// to a group; the bytes are what a transfer that was given up waits for.
constexpr size_t kGroupParts = 256;
constexpr size_t kGroupBytes = 4 << 20;
constexpr size_t kMaxAhead = 4;  // groups of a link that are asked for or under way

constexpr SideLimits kSideLimits{512, 64 + 16 * kGroupParts};

// The first frame in either direction. In an answer `from` and `token` say nothing, and a text in
// `refusal` says why not.
struct Hello {
  PeerId from = -1;
  uint64_t token = 0;  // of the side that is called
  NcclUniqueId id;     // of the communicator that the caller is rank 0 of
  std::string refusal;
};

struct Range {
  uint64_t begin = 0, bytes = 0;  // of the owner's memory
  bool operator==(const Range&) const = default;
};

// May this group of a post go through the window?
struct Ask {
  uint64_t post = 0;
  uint32_t group = 0, n_groups = 0;
  uint32_t number = 0;  // KvTransfer's
  WindowKey window;
  KvOp op = KvOp::write;
  std::vector<Range> ranges;  // in the order of the calls
};

struct Message {
  enum Kind : uint8_t {
    ask = 2,
    accepted = 3,
    refused = 4,
    go = 5,      // the poster's half of the group is enqueued
    drop = 6,    // it will not be
    placed = 7,  // the owner's half has run, and is counted
    lost = 8,    // it was broken off, or the window closed meanwhile
    renew = 9,   // a new communicator in place of one that broke
  };
  Kind kind = ask;
  uint64_t seq = 0;  // of the group, counted by the poster
  Ask asked;
  NcclUniqueId id;
};

std::string frame(const Hello& hello);
std::string frame(const Message& message);
std::optional<Hello> parse_hello(std::string_view body);
std::optional<Message> parse_message(std::string_view body);

}  // namespace xpyd::nccl

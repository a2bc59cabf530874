// What the two ends of an rdma link tell each other, as bytes. Everything here comes from outside:
// counts and lengths are checked, and a message that is not exactly right is refused.
//
// A body (side_channel.h) begins with its kind. Numbers are little endian.
//
// Thread safety: functions.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "disagg/transport/side_channel.h"
#include "disagg/transport/transport.h"

namespace xpyd::rdma {

constexpr size_t kMaxRails = 16;
constexpr size_t kMaxKeys = 256;    // ranges of one window
constexpr size_t kMaxHello = 2048;  // bytes that a stranger may send
constexpr size_t kMaxFrame = 64 + kMaxKeys * (16 + 4 * kMaxRails);
constexpr SideLimits kSideLimits{kMaxHello, kMaxFrame};

using Address = SideAddress;
inline std::string to_text(const Address& address) { return xpyd::to_text("rdma1", address); }
inline Result<Address> parse_address(const std::string& text) { return parse_side_address("rdma1", text); }

// One end of a queue pair.
struct RailEnd {
  std::array<uint8_t, 16> gid{};
  uint16_t lid = 0;
  uint8_t mtu = 0;               // ibv_mtu
  uint8_t reads = 0;             // RDMA READs that it asks or answers at a time
  uint32_t number = 0, psn = 0;  // 24 bits
};

// The first frame in either direction: the poster calls, the owner of memory answers. An answer
// with no rails is a refusal, and `refusal` says why.
struct Hello {
  PeerId from = -1;
  uint64_t token = 0;  // of the side that is called; in the answer 0
  std::vector<RailEnd> rails;
  std::string refusal;  // at most 256 bytes
};

// The keys of a window that its owner has opened: one per range and rail.
struct WindowKeys {
  struct Range {
    uint64_t begin = 0, bytes = 0;
    std::vector<uint32_t> keys;  // [rails of the link]
  };
  uint32_t index = 0, generation = 0;
  KvOp op = KvOp::write;
  std::vector<Range> ranges;  // sorted by begin, apart from each other
};

// Once a link is up. The poster sends sync, refused and renew; the owner the others.
struct Message {
  enum Kind : uint8_t {
    opened = 2,   // a window and its keys; again, with other keys, when the link was renewed
    closed = 3,   // index and generation of a window that is no more
    sync = 4,     // answered by synced: what the owner had sent before has then arrived
    refused = 5,  // as sync, and the owner counts a piece that no window allowed
    synced = 6,
    renew = 7,    // queue pairs broke: these are new; number is 1 where the owner's side refused
    renewed = 8,  // the owner's new ones, or none: it cannot
  };
  Kind kind = sync;
  WindowKeys window;
  uint64_t number = 0;
  std::vector<RailEnd> rails;
};

std::string frame(const Hello& hello);
std::string frame(const Message& message);
std::optional<Hello> parse_hello(std::string_view body);
std::optional<Message> parse_message(std::string_view body, size_t n_rails);

}  // namespace xpyd::rdma

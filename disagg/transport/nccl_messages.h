// What the two ends of an nccl link tell each other. The poster calls; `ask`, `go`, `drop` and `renew` are its
// messages, the others the owner's. Everything here comes from outside: counts and lengths are checked, and a message
// that is not exactly right is refused.
//
// Thread safety: functions.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "disagg/transport/meeting.h"
#include "disagg/transport/nccl_api.h"
#include "disagg/transport/transport.h"

namespace xpyd::disagg::nccl {

// Of one group: what is between ncclGroupStart and ncclGroupEnd. NCCL has had limits of 2,048 calls
// to a group; the bytes are what a transfer that was given up waits for.
constexpr size_t kGroupParts = 256;
constexpr size_t kGroupBytes = 4 << 20;
constexpr size_t kMaxAhead = 4;  // groups of a link that are asked for or under way
constexpr size_t kMaxMessageBytes = 512 + 16 * kGroupParts;

// May this group of a post go through the window?
struct Ask {
  uint64_t post = 0;
  uint32_t group = 0, n_groups = 0;
  uint32_t number = 0;  // KvTransfer's
  WindowKey window;
  KvOp op = KvOp::write;
  std::vector<AddressRange> ranges;  // of the owner's memory, in the order of the calls
};
template <class A>
void fields(A& a, typename A::template Ref<Ask> s) {
  auto& [post, group, n_groups, number, window, op, ranges] = s;
  a.bits("post", post);
  a.bits("group", group);
  a.bits("n_groups", n_groups);
  a.bits("number", number);
  a.part("window", window);
  a.choice("op", op, KvOp::read);
  a.list("ranges", ranges, kGroupParts);
}

struct Message {
  enum Kind : uint8_t {
    ask,
    accepted,
    refused,
    go,      // the poster's half of the group is enqueued
    drop,    // it will not be
    placed,  // the owner's half has run, and is counted
    lost,    // it was broken off, or the window closed meanwhile
    renew,   // a communicator, of which the poster is rank 0: the first, or in place of one that broke
  };
  Kind kind = ask;
  uint64_t seq = 0;                // of the group, counted by the poster
  std::optional<Ask> asked;        // ask
  std::optional<NcclUniqueId> id;  // renew
};
template <class A>
void fields(A& a, typename A::template Ref<Message> s) {
  auto& [kind, seq, asked, id] = s;
  a.choice("kind", kind, Message::renew);
  a.bits("seq", seq);
  a.maybe("asked", asked);
  a.maybe("id", id);
}

// What must hold between fields, too.
inline Result<Message> read_message(std::string_view bytes) {
  Result<Message> message = from_bytes<Message>(bytes);
  if (!message) return message;
  const Message& m = message.value();
  if (m.asked.has_value() != (m.kind == Message::ask)) return invalid("asked: expected with an ask");
  if (m.id.has_value() != (m.kind == Message::renew)) return invalid("id: expected with a renew");
  if (m.kind != Message::ask) return message;
  if (m.asked->group >= m.asked->n_groups) return invalid("group: beyond the last of its post");
  size_t left = kGroupBytes;
  for (const AddressRange& range : m.asked->ranges) {
    if (range.bytes == 0 || range.bytes > left || range.bytes > UINT64_MAX - range.begin)
      return invalid("ranges: more than a group has, none, or beyond all memory");
    left -= range.bytes;
  }
  return message;
}

}  // namespace xpyd::disagg::nccl

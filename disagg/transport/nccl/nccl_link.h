// The initiator's half of the nccl transport: a link to one owner of memory. start() makes the link's communicator,
// with the initiator as rank 0. The owner's half is the class Client in nccl.cc.
//
// A transfer (`Transfer`) is cut into groups, and the link asks the owner for each. After the owner has accepted a
// group, the initiator either enqueues its half and sends `go`, or sends `drop`. So no group is enqueued at one end
// only, and a refused or dropped group has touched no memory. At most kMaxAhead groups are asked for or in flight. A
// transfer is done when the owner has placed all of its groups and this end has run them.
//
// If a transfer is given up (cancelled, late) or has failed, its groups in flight have kPatience seconds to end. Then
// the link aborts the communicator and ends. So does an NCCL error, and a peer that does not join the communicator in
// kJoinSeconds. A link that has ended is dead, and why() says why; the instance connects again. The link asks for
// nothing before the communicator is ready.
//
// Thread safety: Transfer: any thread may use `wanted` and `state`. Link: the bootstrap's I/O thread; any thread may
// call dead(), why() and settled().
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/copy.h"
#include "disagg/transport/bootstrap.h"
#include "disagg/transport/nccl/nccl_pipe.h"

namespace xpyd::disagg::nccl {

// ---- The messages between the two ends of a link. The initiator sends `join`, `ask`, `go` and `drop`; the owner
// sends the others. The readers check counts and lengths, and refuse a message that is not exactly right.

// Limits of a group, which is the calls between ncclGroupStart and ncclGroupEnd. Some versions of NCCL allow 2,048
// calls at most. A transfer that is given up waits for the bytes of its groups in flight.
constexpr size_t kGroupParts = 256;
constexpr size_t kGroupBytes = 4 << 20;
constexpr size_t kMaxAhead = 4;  // groups of a link that are asked for or in flight
constexpr size_t kMaxMessageBytes = 512 + 16 * kGroupParts;

// Asks whether this group of a transfer is allowed by a registration.
struct Ask {
  uint64_t post = 0;
  uint32_t group = 0, n_groups = 0;
  RemoteKey registration;
  KvOp op = KvOp::write;
  std::vector<AddressRange> ranges;  // of the owner's memory, in the order of the calls
};
template <class A>
void fields(A& a, typename A::template Ref<Ask> s) {
  auto& [post, group, n_groups, registration, op, ranges] = s;
  XPYD_EACH(a, post, group, n_groups, registration, op);
  a.list("ranges", ranges, kGroupParts);
}

struct Message {
  enum Kind : uint8_t {
    ask,
    accepted,
    refused,
    go,      // the initiator has enqueued its half of the group
    drop,    // the initiator does not enqueue it
    placed,  // the owner's half has run and is counted
    lost,    // the owner's half was aborted, or the registration was closed
    join,    // makes the communicator, before all others; the initiator is rank 0
  };
  Kind kind = ask;
  uint64_t seq = 0;                // number of the group; the initiator counts
  std::optional<Ask> asked;        // ask
  std::optional<NcclUniqueId> id;  // join
};
template <class A>
void fields(A& a, typename A::template Ref<Message> s) {
  auto& [kind, seq, asked, id] = s;
  a.choice("kind", kind, Message::join);
  XPYD_EACH(a, seq, asked, id);
}

// Reads a message and checks what must hold between its fields.
inline Result<Message> read_message(std::string_view bytes) {
  Result<Message> message = from_bytes<Message>(bytes);
  if (!message) return message;
  const Message& m = message.value();
  if (m.asked.has_value() != (m.kind == Message::ask)) return invalid("asked: expected in messages of kind ask only");
  if (m.id.has_value() != (m.kind == Message::join)) return invalid("id: expected in messages of kind join only");
  if (m.kind != Message::ask) return message;
  if (m.asked->group >= m.asked->n_groups) return invalid("group: it exceeds the number of groups");
  size_t left = kGroupBytes;
  for (const AddressRange& range : m.asked->ranges) {
    if (range.bytes == 0 || range.bytes > left || range.bytes > UINT64_MAX - range.begin)
      return invalid("ranges: one is empty, too large for a group, or beyond the address space");
    left -= range.bytes;
  }
  return message;
}

// ---- The initiator's end.

struct Transfer {
  Transfer(uint64_t id_, const KvTransfer& what_, std::span<const Copy> copies);
  const uint64_t id;
  const KvTransfer what;
  std::vector<std::vector<Copy>> groups;  // at least one
  std::atomic<bool> wanted{true};
  std::atomic<TransferState> state{TransferState::in_flight};

  // Only the link uses these.
  size_t asked = 0, placed = 0;  // groups
  int inside = 0;                // groups for which NCCL may access the local memory
  bool failed = false;
  double unwanted_s = 0;  // RealClock time when the link saw that it is given up or has failed; 0: neither
};

class Link {
 public:
  using MakePipe = std::function<std::unique_ptr<Pipe>(const NcclUniqueId& id, int rank)>;
  Link(const NcclApi& api, MakePipe make_pipe, ChannelPtr channel)
      : api_(api), make_pipe_(std::move(make_pipe)), channel_(std::move(channel)) {}

  void start();
  void add(std::shared_ptr<Transfer> post);
  bool take(std::string_view body);  // handles a message; false: an owner does not send this
  void end(const std::string& why);  // the link is dead from now on; its transfers fail
  bool turn();                       // continues all work; true: call it again soon

  bool dead() const { return dead_; }
  bool gone() const { return dead_ && posts_.empty() && !pipe_; }
  std::string why() const;                   // the reason if dead(), else ""
  bool settled() const { return settled_; }  // the communicator is ready, or the link is dead

 private:
  struct Flight {  // a group, from `ask` to its end
    std::shared_ptr<Transfer> post;
    size_t group;
    bool gone = false, run = false, placed = false;  // `go` was said; this end has run; the owner has answered
  };
  bool usable(const Transfer& post) const { return post.wanted && !post.failed && !dead_; }
  bool connected() const { return pipe_ && pipe_->state() == Pipe::State::ready; }
  void ask();
  void accepted(uint64_t seq, Flight& flight);
  void ended(uint64_t seq, bool whole);
  void finish(uint64_t seq, Flight& flight);
  void settle();

  const NcclApi& api_;
  const MakePipe make_pipe_;
  const ChannelPtr channel_;
  std::unique_ptr<Pipe> pipe_;                   // null: not made, or the link is dead and the pipe has run empty
  std::deque<std::shared_ptr<Transfer>> posts_;  // neither done nor failed, in the order of add()
  std::map<uint64_t, Flight> flights_;
  uint64_t last_seq_ = 0;
  std::atomic<bool> dead_{false}, settled_{false};
  mutable std::mutex mutex_;
  std::string why_;
};

}  // namespace xpyd::disagg::nccl

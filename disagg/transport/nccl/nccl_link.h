// The poster's half of the nccl wire: a link to one owner of memory. Its communicator is made when
// the link is, with the poster as rank 0; the owner's half is the Guest of nccl.cc.
//
// A post is cut into groups. The link asks for each; once the owner has accepted, the poster either
// enqueues its half and says `go`, or says `drop`: nothing is enqueued at one end only, and what is
// refused or given up has touched nothing. Up to kMaxAhead groups are asked for or under way. A
// post is done when the owner has placed all of its groups and this end has run them.
//
// What is under way when a post is given up (cancelled, late) or has failed has kPatience to run
// out; then the communicator is aborted and the link makes another one. So does an error of NCCL's,
// unless it comes while the communicator is being made: then the link is dead, and says why. It is
// dead, too, when the other end does not join. Nothing is asked for before a communicator stands.
//
// Thread safety: Transfer: `wanted`, `state` any thread. Link: the meeting's thread; dead(), why() and
// settled() any thread.
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

// ---- What the two ends of a link tell each other. The poster calls; `ask`, `go`, `drop` and `renew` are its messages,
// the others the owner's. All of it comes from outside: counts and lengths are checked, and a message that is not
// exactly right is refused.

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
  XPYD_EACH(a, seq, asked, id);
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

// ---- The poster's end.

struct Transfer {
  Transfer(uint64_t id_, const KvTransfer& what_, std::span<const Copy> copies);
  const uint64_t id;
  const KvTransfer what;
  std::vector<std::vector<Copy>> groups;  // at least one
  std::atomic<bool> wanted{true};
  std::atomic<TransferState> state{TransferState::in_flight};

  // The link's.
  size_t asked = 0, placed = 0;  // groups
  int inside = 0;                // groups that NCCL may be in the local memory for
  bool failed = false;
  double unwanted_s = 0;  // since when it is given up, or has failed
};

class Link {
 public:
  using MakePipe = std::function<std::unique_ptr<Pipe>(const NcclUniqueId& id, int rank)>;
  Link(const NcclApi& api, MakePipe make_pipe, ChannelPtr channel)
      : api_(api), make_pipe_(std::move(make_pipe)), channel_(std::move(channel)) {}

  void start();
  void add(std::shared_ptr<Transfer> post);
  bool take(std::string_view body);  // false: the peer talks nonsense
  void end(const std::string& why);  // no post gets through any more
  bool turn();                       // true: again soon

  bool dead() const { return dead_; }
  bool gone() const { return dead_ && posts_.empty() && pipes_.empty(); }
  std::string why() const;                   // dead
  bool settled() const { return settled_; }  // its first communicator stands, or dead()

 private:
  struct Flight {  // a group from ask to its end
    std::shared_ptr<Transfer> post;
    size_t group;
    int pipe = 0;  // that it has gone into, as n_pipes_ counted
    bool gone = false, run = false, placed = false;
  };
  bool usable(const Transfer& post) const { return post.wanted && !post.failed && !dead_; }
  bool connected() const { return !pipes_.empty() && pipes_.back()->state() == Pipe::State::ready; }
  void ask();
  void accepted(uint64_t seq, Flight& flight);
  void ended(uint64_t seq, bool whole);
  void finish(uint64_t seq, Flight& flight);
  void settle();
  void renew();

  const NcclApi& api_;
  const MakePipe make_pipe_;
  const ChannelPtr channel_;
  std::deque<std::unique_ptr<Pipe>> pipes_;      // the last one is in use, the others run out
  int n_pipes_ = 0;                              // renewals
  std::deque<std::shared_ptr<Transfer>> posts_;  // not settled, in their order
  std::map<uint64_t, Flight> flights_;
  uint64_t last_seq_ = 0;
  std::atomic<bool> dead_{false}, settled_{false};
  mutable std::mutex mutex_;
  std::string why_;
};

}  // namespace xpyd::disagg::nccl

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
// Thread safety: Post: `wanted`, `state` any thread. Link: the meeting's thread; dead(), why() and
// settled() any thread.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/copy.h"
#include "disagg/transport/nccl_messages.h"
#include "disagg/transport/nccl_pipe.h"

namespace xpyd::disagg::nccl {

struct Post {
  Post(uint64_t id_, const KvTransfer& what_, std::span<const Copy> copies);
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
  void add(std::shared_ptr<Post> post);
  bool take(std::string_view body);  // false: the peer talks nonsense
  void end(const std::string& why);  // no post gets through any more
  bool turn();                       // true: again soon

  bool dead() const { return dead_; }
  bool gone() const { return dead_ && posts_.empty() && pipes_.empty(); }
  std::string why() const;                   // dead
  bool settled() const { return settled_; }  // its first communicator stands, or dead()

 private:
  struct Flight {  // a group from ask to its end
    std::shared_ptr<Post> post;
    size_t group;
    int pipe = 0;  // that it has gone into, as n_pipes_ counted
    bool gone = false, run = false, placed = false;
  };
  bool usable(const Post& post) const { return post.wanted && !post.failed && !dead_; }
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
  std::deque<std::unique_ptr<Pipe>> pipes_;  // the last one is in use, the others run out
  int n_pipes_ = 0;                          // renewals
  std::deque<std::shared_ptr<Post>> posts_;  // not settled, in their order
  std::map<uint64_t, Flight> flights_;
  uint64_t last_seq_ = 0;
  std::atomic<bool> dead_{false}, settled_{false};
  mutable std::mutex mutex_;
  std::string why_;
};

}  // namespace xpyd::disagg::nccl

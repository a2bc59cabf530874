// The initiator's half of the tcp transport. cut() cuts a transfer into frames. A PosterSession has the transfers to
// one owner. A link on each connection takes the next frame of the session when its socket has room.
//
// Thread safety: PosterSession: any thread.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "disagg/net/hello.h"
#include "disagg/transport/tcp/tcp_frames.h"
#include "disagg/transport/tcp/tcp_loop.h"

namespace xpyd::disagg::tcp {

struct Frame {
  size_t first = 0, n = 0;  // part of Transfer::copies
  size_t bytes = 0;
};

struct Transfer {
  uint64_t id = 0;
  KvTransfer what;
  std::vector<Copy> copies;  // each lies in one frame
  std::vector<Frame> frames;
  // The session's mutex guards the rest.
  uint32_t begun = 0, answered = 0;  // frames
  int inside = 0;                    // links that access the local rows now
  bool arrived = false, refused = false;
  bool given_up = false;  // no link enters the local rows any more
};
// Fills post.copies and post.frames. Splits copies where a frame would exceed kFrameBytes.
void cut(const TransferPlan& plan, Transfer& post);

class PosterSession {
 public:
  explicit PosterSession(const std::string& address_) : address(address_) {}
  const std::string address;
  const uint64_t number = random_secret();  // the owner joins the connections of one session by it
  std::vector<AddressRange> regions;        // the owner's KV memory; set before the first link exists
  bool dead() const { return dead_; }
  void give_up() { dead_ = true; }

  void add(const std::shared_ptr<Transfer>& post) {
    std::lock_guard lock(mutex_);
    posts_[post->id] = post;
    unsent_.push_back(post);
  }
  // Returns the state of the transfer, and forgets it once it is done or failed. With `give_up` it is to end early. It
  // stays in flight while a link accesses its local rows.
  TransferState poll(Transfer& post, bool give_up) {
    std::lock_guard lock(mutex_);
    const bool done = post.arrived && post.answered == post.frames.size();
    if (!done && (give_up || post.refused || dead_) && !std::exchange(post.given_up, true)) {
      std::erase_if(unsent_, [&](const auto& other) { return other.get() == &post; });
      if (post.begun > 0 && post.begun < post.frames.size())
        control_.push_back({.type = FrameType::abandon, .post = post.id, .n_frames = post.begun});
    }
    if (!done && (!post.given_up || post.inside > 0)) return TransferState::in_flight;
    posts_.erase(post.id);
    return done ? TransferState::done : TransferState::failed;
  }

  // For the links. Takes the next abandon, or returns false.
  bool next_control(FrameHead& head) {
    std::lock_guard lock(mutex_);
    if (control_.empty()) return false;
    head = control_.front();
    control_.pop_front();
    return true;
  }
  // Takes the next frame of the oldest unsent transfer, or returns null.
  std::shared_ptr<Transfer> next_frame(uint32_t& frame) {
    std::lock_guard lock(mutex_);
    if (unsent_.empty()) return nullptr;
    std::shared_ptr<Transfer> post = unsent_.front();
    frame = post->begun++;
    if (post->begun == post->frames.size()) unsent_.pop_front();
    return post;
  }
  std::shared_ptr<Transfer> find(uint64_t post) {
    std::lock_guard lock(mutex_);
    auto found = posts_.find(post);
    return found == posts_.end() ? nullptr : found->second;
  }
  // Surrounds each access to the local rows. If enter() returns false, the transfer was given up.
  bool enter(Transfer& post) {
    std::lock_guard lock(mutex_);
    if (post.given_up) return false;
    ++post.inside;
    return true;
  }
  void leave(Transfer& post) {
    std::lock_guard lock(mutex_);
    --post.inside;
  }
  void answered(const FrameHead& head) {
    std::lock_guard lock(mutex_);
    auto found = posts_.find(head.post);
    if (found == posts_.end()) return;
    Transfer& post = *found->second;
    ++post.answered;
    post.arrived |= head.status == FrameStatus::arrived;
    post.refused |= head.status == FrameStatus::refused;
  }

 private:
  std::atomic<bool> dead_{false};
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Transfer>> posts_;  // neither done nor failed
  std::deque<std::shared_ptr<Transfer>> unsent_;                   // transfers with frames that no link has taken
  std::deque<FrameHead> control_;
};

std::unique_ptr<Link> make_poster_link(Fd socket, std::shared_ptr<PosterSession> session);

}  // namespace xpyd::disagg::tcp

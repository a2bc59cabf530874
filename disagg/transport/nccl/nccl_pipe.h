// One end of a communicator of two ranks, and the stream that its groups run on.
//
// Groups run in the order in which they were enqueued, which is the same on both ends; each is one ncclGroup of sends,
// or of receives, with as many bytes at the other end. A group ends whole, or is broken off with everything behind it
// when the communicator breaks: by NCCL's error, or by abort(). No call waits for the peer. Once turn() has told that a
// group has ended, NCCL does not touch its memory any more, whatever the peer does.
//
// Thread safety: one thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/device/device.h"
#include "disagg/transport/nccl/nccl_api.h"
#include "disagg/transport/transport.h"

namespace xpyd::disagg::nccl {

constexpr int kJoinSeconds = 30;  // for a communicator to stand

class Pipe {
 public:
  enum class State { joining, ready, broken };

  // `queue`: a VendorQueue of the pipe's own.
  Pipe(const NcclApi& api, std::unique_ptr<DeviceQueue> queue, const NcclUniqueId& id, int rank);
  ~Pipe();  // breaks off what is under way
  Pipe(const Pipe&) = delete;

  void enqueue(uint64_t seq, bool send, std::vector<MemoryRange> parts);
  void abort(const std::string& why);  // what is enqueued from now on is broken off, too
  // Takes what has come as far as it can be taken. ended(seq, whole) for each group, in order.
  // True: something is under way, and will not say so by itself.
  bool turn(const std::function<void(uint64_t seq, bool whole)>& ended);

  State state() const { return state_; }
  bool was_ready() const { return was_ready_; }    // has been ready
  bool overdue() const;                            // the other end does not join
  bool by_nccl() const { return by_nccl_; }        // broken: not by abort()
  const std::string& why() const { return why_; }  // broken
  bool empty() const { return groups_.empty() && state_ != State::joining && drained_; }

 private:
  struct Group {
    uint64_t seq;
    bool send;
    std::vector<MemoryRange> parts;
    int64_t mark;  // of the queue, behind the group
  };
  void launch(Group& group);
  bool check(int result);  // false: broken
  int async();

  const NcclApi& api_;
  const std::unique_ptr<DeviceQueue> queue_;
  const int peer_;  // rank
  const double made_s_;
  NcclComm comm_ = nullptr;
  State state_ = State::joining;
  bool was_ready_ = false, by_nccl_ = false, drained_ = true;
  std::string why_;
  std::deque<Group> groups_;  // the first n_launched_ are on the queue
  size_t n_launched_ = 0;
  bool launching_ = false;  // NCCL is not done with enqueueing the last of them
  int64_t end_mark_ = 0;    // broken: of the queue, behind everything
};

}  // namespace xpyd::disagg::nccl

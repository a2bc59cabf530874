// One end of a communicator of two ranks, and the CUDA stream that its groups run on.
//
// Groups run in the order of enqueue(), which is the same on both ends. A group is one NCCL group of sends or of
// receives, and has the same bytes at the other end. It ends complete, or it is broken off: an NCCL error or abort()
// breaks off all groups that have not ended. No call but the destructor waits. After turn() has reported the end of a
// group, NCCL does not access its memory any more, whatever the peer does.
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

constexpr int kJoinSeconds = 30;  // until the communicator is ready

class Pipe {
 public:
  enum class State { joining, ready, broken };

  // Requires: `queue` is a VendorQueue that nothing else uses.
  Pipe(const NcclApi& api, std::unique_ptr<DeviceQueue> queue, const NcclUniqueId& id, int rank);
  ~Pipe();  // aborts the communicator and waits for the stream
  Pipe(const Pipe&) = delete;

  void enqueue(uint64_t seq, bool send, std::vector<MemoryRange> parts);
  void abort(const std::string& why);  // also breaks off groups that are enqueued later
  // Launches groups, and calls ended(seq, whole) for each group that has ended, in order. Returns true while the
  // communicator or a group is not finished; call turn() again then, because nothing wakes the caller.
  bool turn(const std::function<void(uint64_t seq, bool whole)>& ended);

  State state() const { return state_; }
  bool overdue() const;                            // the other end has not joined in kJoinSeconds
  const std::string& why() const { return why_; }  // if broken: the reason
  bool empty() const { return groups_.empty() && state_ != State::joining && drained_; }

 private:
  struct Group {
    uint64_t seq;
    bool send;
    std::vector<MemoryRange> parts;
    int64_t mark;  // the queue's mark behind the group
  };
  void launch(Group& group);
  bool check(int result);  // breaks the pipe after an error; false: it is broken
  int async();

  const NcclApi& api_;
  const std::unique_ptr<DeviceQueue> queue_;
  const int peer_;  // rank
  const double made_s_;
  NcclComm comm_ = nullptr;
  State state_ = State::joining;
  bool drained_ = true;
  std::string why_;
  std::deque<Group> groups_;  // the first n_launched_ are on the stream
  size_t n_launched_ = 0;
  bool launching_ = false;  // NCCL is still enqueueing the last of these
  int64_t end_mark_ = 0;    // if broken: the queue's mark behind everything
};

}  // namespace xpyd::disagg::nccl

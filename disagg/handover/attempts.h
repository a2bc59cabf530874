// The attempts that an instance knows: their cancel flags, and the sequences that serve them, whose
// events go to the conductor.
//
// Thread safety: the instance's thread.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <unordered_map>

#include "disagg/handover/transfer_plan.h"
#include "disagg/messages.h"

namespace xpyd::disagg {

// What a byte costs on an instance's wire, over its last posts: from each post to its end, time in
// which several are under way counted once. The end is when the poster sees it; where that is
// between two layers of the next prompt, up to a layer's computation too late.
class TransportRate {
 public:
  void done(double post_s, double end_s, size_t bytes) {
    const double busy_s = end_s - std::max(post_s, last_end_s_);
    last_end_s_ = std::max(last_end_s_, end_s);
    Sample& sample = samples_[n_++ % samples_.size()];
    seconds_ += std::max(0.0, busy_s) - sample.seconds;
    bytes_ += double(bytes) - sample.bytes;
    sample = {std::max(0.0, busy_s), double(bytes)};
  }
  double s_per_byte() const { return bytes_ > 0 ? std::max(0.0, seconds_) / bytes_ : 0; }

 private:
  struct Sample {
    double seconds = 0, bytes = 0;
  };
  std::array<Sample, 64> samples_ = {};
  size_t n_ = 0;
  double seconds_ = 0, bytes_ = 0;  // of the samples
  double last_end_s_ = 0;
};

namespace handover {
struct Visits;
}

// KV of one attempt that has crossed.
struct Moved {
  InstanceId from, to;
  uint64_t request;
  double begin_s, end_s;  // Clock
  int tokens;
  int64_t bytes;
};

// What the two sides of an instance (handover/sender.h, handover/receiver.h) work with.
struct InstanceParts {
  InstanceId self = -1;
  KvMemory& memory;
  KvTransport& transport;
  Clock& clock;
  MessageBus& bus;
  const Tokenizer* tokenizer = nullptr;  // may be null
  int n_layers = 0;
  DisaggOrder remote = DisaggOrder::push;      // of all prompts whose KV changes hands (kv_room.h)
  std::optional<KvShards> post_by_stage = {};  // each post is of rows of one of these stages; nothing: of any
  double lease_s = 0;                  // without a word of the peer, KV that is held for it is given up; 0: never
  bool checksum = false;               // of every block that crosses
  handover::Visits* visits = nullptr;  // of a test
  std::function<void(const Moved& moved)> moved = {};  // null: nobody asks
  TransportRate rate = {};                             // of its own posts
  struct {                                             // cumulative, of them; planning and posting
    int64_t transfers = 0, bytes = 0, descriptors = 0;
    double seconds = 0;
  } posted = {};
  FetchStats fetch = {};
  Peers peers{memory, transport};

  void tell(InstanceId to, Message message);
  double new_deadline();          // Clock seconds
  int post_end(int layer) const;  // of the layers that go in one post with this one
  // Of a post of so many bytes. However alive the peer is, what a wire has lost is not waited for
  // for ever; and of the time that the request has (`until_s`; 0: all) half is left to compute its
  // prompt again.
  double post_deadline(double until_s, size_t bytes) const;
};

class Attempts {
 public:
  explicit Attempts(InstanceParts& parts) : parts_(parts) {}

  // A sequence of the attempt. `silent`: its events go nowhere (decode_first, on P).
  SequencePtr begin(AttemptId attempt, std::shared_ptr<const Request> request, const ChoiceState& state,
                    bool silent = false);
  // What is not known yet is born cancelled.
  void abort(AttemptId attempt) { flag(attempt)->store(true); }
  void handle(InstanceId, const AbortAttempt& message) { abort(message.attempt); }
  bool aborted(AttemptId attempt) const;
  std::shared_ptr<void> ticket(AttemptId attempt, AttemptProgress::Stage stage);

 private:
  struct Known {
    std::shared_ptr<std::atomic<bool>> flag;
    double since_s;
  };
  std::shared_ptr<std::atomic<bool>> flag(AttemptId attempt);

  InstanceParts& parts_;
  std::unordered_map<AttemptId, Known> known_;
  size_t swept_ = 64;  // the table's size at which it is looked through next
};

}  // namespace xpyd::disagg

// Attempts keeps the cancel flags of the attempts that an instance knows. It makes the sequences that serve them, and
// sends the events of these sequences to the conductor.
//
// Thread safety: the instance's thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <unordered_map>

#include "disagg/handover/transfer_plan.h"
#include "disagg/messages.h"

namespace xpyd::disagg {

// TransportRate measures the seconds per byte of an instance's transport, as a moving mean. Time in which several
// transfers are in flight counts once. A transfer ends when the instance polls it. If the instance polls between two
// layers of its next prompt, the measured end is up to one layer's computation late.
class TransportRate {
 public:
  void done(double post_s, double end_s, size_t bytes) {
    constexpr double kOld = 63.0 / 64;
    seconds_ = kOld * seconds_ + std::max(0.0, end_s - std::max(post_s, last_end_s_));
    bytes_ = kOld * bytes_ + double(bytes);
    last_end_s_ = std::max(last_end_s_, end_s);
  }
  double s_per_byte() const { return bytes_ > 0 ? seconds_ / bytes_ : 0; }

 private:
  double seconds_ = 0, bytes_ = 0;
  double last_end_s_ = 0;  // Clock
};

namespace handover {
struct Visits;
}

// The KV of one attempt that has crossed.
struct Moved {
  InstanceId from, to;
  uint64_t request;
  double begin_s, end_s;  // Clock
  int tokens;
  int64_t bytes;
  const char* kind = "hand-over";  // or "fetch": a prefix for a prompt; "copy": a prompt's KV for a second D
};

// InstanceParts is what the two sides of an instance share (handover/sender.h, handover/receiver.h).
struct InstanceParts {
  InstanceId self = -1;
  KvMemory& memory;
  KvTransport& transport;
  Clock& clock;
  MessageBus& bus;
  const Tokenizer* tokenizer = nullptr;  // may be null
  int n_layers = 0;
  DisaggOrder order = DisaggOrder::push;               // the order of all prompts whose KV changes hands (kv_room.h)
  std::optional<KvShards> post_by_stage = {};          // if set, a transfer carries the layers of one stage only
  double lease_s = 0;                                  // how long KV is held for a silent peer; 0: for ever
  handover::Visits* visits = nullptr;                  // for tests
  std::function<void(const Moved& moved)> moved = {};  // called after each hand-over; may be null
  TransportRate rate = {};                             // of this instance's transfers
  struct {  // cumulative; `seconds` is the time for planning and starting transfers
    int64_t transfers = 0, bytes = 0, descriptors = 0;
    double seconds = 0;
  } posted = {};
  FetchStats fetch = {};
  Peers peers{memory, transport};

  void tell(InstanceId to, Message message);
  double new_deadline();          // Clock; infinity without leases
  int post_end(int layer) const;  // end of the layers that one transfer may carry together with `layer`
  // Returns the deadline (Clock) of a transfer of `bytes`. It ends even while the peer lives, because the transport may
  // have lost it. At most half of the request's time until `until_s` (0: no limit) is spent, so that the rest suffices
  // to compute the prompt again.
  double post_deadline(double until_s, size_t bytes) const;
};

// Requires: `parts` outlives it.
class Attempts {
 public:
  explicit Attempts(InstanceParts& parts) : parts_(parts) {}

  // Makes a sequence of the attempt. If `silent`, its events go nowhere (decode_first, on P).
  SequencePtr begin(AttemptId attempt, std::shared_ptr<const Request> request, const ChoiceState& state,
                    bool silent = false);
  // Cancels the attempt. An attempt that is not known yet is cancelled as soon as it begins.
  void abort(AttemptId attempt) { flag(attempt)->store(true); }
  void handle(InstanceId, const AbortAttempt& message) { abort(message.attempt); }
  bool aborted(AttemptId attempt) const;  // false also if it is not known
  // Returns a ticket. When its last copy is destroyed, the conductor gets AttemptProgress{attempt, stage}.
  std::shared_ptr<void> ticket(AttemptId attempt, AttemptProgress::Stage stage);

 private:
  struct Known {
    std::shared_ptr<std::atomic<bool>> flag;
    double since_s;
  };
  std::shared_ptr<std::atomic<bool>> flag(AttemptId attempt);

  InstanceParts& parts_;
  std::unordered_map<AttemptId, Known> known_;
  size_t swept_ = 64;  // size of known_ at which old flags are removed next
};

}  // namespace xpyd::disagg

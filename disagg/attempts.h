// The attempts that an instance knows: their cancel flags, and the sequences that serve them, whose
// events go to the conductor.
//
// Thread safety: the instance's thread.
#pragma once

#include <atomic>
#include <memory>
#include <unordered_map>

#include "disagg/messages.h"

namespace xpyd {

// What the two sides of an instance (kv_sender.h, kv_receiver.h) work with.
struct InstanceParts {
  InstanceId self = -1;
  KvMemory& memory;
  KvTransport& wire;
  Clock& clock;
  Post& post;
  const Tokenizer* tokenizer = nullptr;  // may be null
  int n_layers = 0;
  int max_batch = 0;
  double lease_s = 0;     // without a word of the peer, KV that is held for it is given up; 0: never
  bool checksum = false;  // of every block that crosses
  std::unordered_map<InstanceId, InstanceInfo> peers = {};

  void tell(InstanceId to, Message message) { post.send(self, to, std::move(message)); }
  double new_deadline();  // Clock seconds
  // Rows [0, tokens) of all layers, as few pieces as the layout allows.
  std::vector<MemoryRange> ranges(const KvView& view, int token_begin, int token_end) const;
  KvView remote_view(InstanceId peer, const KvPlace& place) const;  // before: the peer is known
};

class Attempts {
 public:
  explicit Attempts(InstanceParts& parts) : parts_(parts) {}

  // A sequence of the attempt. `silent`: its events go nowhere (decode_first, on P).
  SequencePtr begin(AttemptId attempt, std::shared_ptr<const Request> request,
                    const ChoiceState& state, bool silent = false);
  // What is not known yet is born cancelled.
  void abort(AttemptId attempt) { flag(attempt)->store(true); }
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

}  // namespace xpyd

#include "disagg/handover/attempts.h"

#include <limits>
#include <utility>

namespace xpyd::disagg {
namespace {

class AttemptSink final : public EventSink {
 public:
  AttemptSink(InstanceParts& parts, AttemptId attempt, const ChoiceState& state)
      : parts_(parts), attempt_(attempt), first_(state.choice) {
    next_.assign(size_t(state.stands_for), int(state.output.size()));
  }
  void on_event(TokenEvent event) override {
    int& next = next_[size_t(event.choice - first_)];
    const int index = event.token >= 0 ? next++ : next;
    parts_.tell(kConductor, TokenOf{attempt_, index, std::move(event)});
  }

 private:
  InstanceParts& parts_;
  AttemptId attempt_;
  int first_;
  std::vector<int> next_;  // [stands_for] index of each choice's next token
};

class SilentSink final : public EventSink {
 public:
  void on_event(TokenEvent) override {}
};

}  // namespace

void InstanceParts::tell(InstanceId to, Message message) { bus.send(self, to, std::move(message)); }

int InstanceParts::post_end(int layer) const {
  int stage = 0;
  while (post_by_stage && post_by_stage->layers(stage).end <= layer) ++stage;
  return post_by_stage ? post_by_stage->layers(stage).end : n_layers;
}

double InstanceParts::new_deadline() {
  return lease_s > 0 ? clock.now() + lease_s : std::numeric_limits<double>::infinity();
}

double InstanceParts::post_deadline(double until_s, size_t bytes) const {
  constexpr double kPatience = 5;            // seconds, if there are no leases
  constexpr double kSlowestTransport = 1e8;  // bytes/s; a link of 1 Gb/s is faster
  const double now = clock.now();
  const double patience = (lease_s > 0 ? lease_s : kPatience) + double(bytes) / kSlowestTransport;
  return now + (until_s > 0 ? std::min(patience, (until_s - now) / 2) : patience);
}

SequencePtr Attempts::begin(AttemptId attempt, std::shared_ptr<const Request> request, const ChoiceState& state,
                            bool silent) {
  std::shared_ptr<EventSink> sink;
  if (silent) {
    sink = std::make_shared<SilentSink>();
  } else {
    sink = std::make_shared<AttemptSink>(parts_, attempt, state);
  }
  auto sequence = make_sequence(std::move(request), state, std::move(sink), flag(attempt), parts_.tokenizer);
  sequence->attempt = attempt;
  return sequence;
}

bool Attempts::aborted(AttemptId attempt) const {
  auto found = known_.find(attempt);
  return found != known_.end() && found->second.flag->load();
}

std::shared_ptr<void> Attempts::ticket(AttemptId attempt, AttemptProgress::Stage stage) {
  return {nullptr, [&parts = parts_, attempt, stage](void*) {
            parts.tell(kConductor, AttemptProgress{attempt, stage});
          }};
}

// Removes flags that no sequence holds. A cancelled flag stays for a while, because a message about its attempt may
// still arrive.
std::shared_ptr<std::atomic<bool>> Attempts::flag(AttemptId attempt) {
  constexpr double kLongest = 60;  // seconds
  const double now = parts_.clock.now();
  if (known_.size() >= swept_) {
    std::erase_if(known_, [&](const auto& entry) {
      return entry.second.flag.use_count() == 1 &&
             (!entry.second.flag->load() || now > entry.second.since_s + kLongest);
    });
    swept_ = 2 * known_.size() + 64;
  }
  auto [at, fresh] = known_.try_emplace(attempt);
  if (fresh) at->second = {std::make_shared<std::atomic<bool>>(false), now};
  return at->second.flag;
}

}  // namespace xpyd::disagg

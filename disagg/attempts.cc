#include "disagg/attempts.h"

#include <algorithm>
#include <limits>
#include <string>

#include "disagg/checksum.h"
#include "disagg/messages.h"

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
  std::vector<int> next_;  // of each choice, the index of its next token
};

class SilentSink final : public EventSink {
 public:
  void on_event(TokenEvent) override {}
};

}  // namespace

void InstanceParts::tell(InstanceId to, Message message) { post.send(self, to, std::move(message)); }

double InstanceParts::new_deadline() {
  return lease_s > 0 ? clock.now() + lease_s : std::numeric_limits<double>::infinity();
}

double InstanceParts::post_deadline(double until_s, size_t bytes) const {
  constexpr double kPatience = 5;       // seconds, where no lease says
  constexpr double kSlowestWire = 1e8;  // bytes/s; a wire of 1 Gb/s does more
  const double now = clock.now();
  const double patience = (lease_s > 0 ? lease_s : kPatience) + double(bytes) / kSlowestWire;
  return now + (until_s > 0 ? std::min(patience, (until_s - now) / 2) : patience);
}

KvShards shards_of(const KvMemory& memory) {
  if (memory.shards()) return *memory.shards();
  const KvShape& shape = memory.layout().shape;
  return {.n_layers = shape.n_layers, .n_kv_heads = shape.n_kv_heads};
}

Status InstanceParts::add_peer(InstanceInfo info) {
  const KvShards own = shards_of(memory);
  const KvShape &shape = info.layout.shape, &mine = memory.layout().shape;
  if (Status status = check_shards(info.shards, "its tp", "its pp"); !status) return status;
  auto text = [](const KvShape& s) {
    return std::to_string(s.n_layers) + " layers, " + std::to_string(s.n_kv_heads) + " heads of " +
           std::to_string(s.head_dim) + " in " + dtype_name(s.dtype);
  };
  if (shape != mine || info.shards.n_layers != mine.n_layers || info.shards.n_kv_heads != mine.n_kv_heads)
    return invalid("it has KV of " + text(shape) + ", expected " + text(mine));
  Route route{{}, map_shards(own, info.shards), map_shards(info.shards, own)};
  for (int rank = 0; rank < info.shards.n_ranks(); ++rank) {
    route.layouts.push_back(info.layout);
    route.layouts.back().shape = rank_shape(info.layout.shape, info.shards, rank);
  }
  routes[info.id] = std::move(route);
  peers[info.id] = std::move(info);
  return ok();
}

Status InstanceParts::check_place(InstanceId peer, const KvPlace& place, int n_tokens) const {
  if (wire.zero_copy()) return ok();
  const KvLayout& layout = peers.at(peer).layout;
  const auto error = [](const std::string& text) { return invalid("its place for KV: " + text); };
  if (place.cached_tokens < 0 || place.cached_tokens > n_tokens)
    return error("cached_tokens " + std::to_string(place.cached_tokens) + ", expected 0 to " +
                 std::to_string(n_tokens));
  const bool contiguous = place.blocks.empty();
  const auto is_block = [&](int32_t block) { return block >= 0 && block < layout.n_blocks; };
  if (contiguous ? !is_block(place.slot) : !std::all_of(place.blocks.begin(), place.blocks.end(), is_block))
    return error("a block or slot beyond its " + std::to_string(layout.n_blocks));
  const int64_t room = contiguous ? layout.block_tokens : int64_t(place.blocks.size()) * layout.block_tokens;
  if (n_tokens > room)
    return error("room for " + std::to_string(room) + " tokens, expected " + std::to_string(n_tokens));
  return ok();
}

std::vector<uint64_t> InstanceParts::checksums(KvHandle kv, int token_begin, int token_end) const {
  return kv_checksums(views(kv), shards_of(memory), token_begin, token_end);
}

bool InstanceParts::checksums_are(KvHandle kv, int token_begin, int token_end,
                                  const std::vector<uint64_t>& expected) const {
  const KvShards shards = shards_of(memory);
  for (int replica = 0; replica < shards.replicas(); ++replica)
    if (kv_checksums(views(kv), shards, token_begin, token_end, replica) != expected) return false;
  return true;
}

std::vector<KvView> InstanceParts::views(KvHandle kv) const {
  std::vector<KvView> views;
  for (int rank = 0; rank < memory.n_ranks(); ++rank) views.push_back(memory.view(kv, rank));
  return views;
}

std::vector<KvView> InstanceParts::remote_views(InstanceId peer, const KvPlace& place) const {
  std::vector<KvView> views;
  const Route& route = routes.at(peer);
  for (size_t rank = 0; rank < route.layouts.size(); ++rank)
    views.push_back({wire.remote(peer, int(rank)), &route.layouts[rank],
                     place.blocks.empty() ? nullptr : place.blocks.data(), place.slot});
  return views;
}

void InstanceParts::plan_write(KvHandle kv, InstanceId peer, const KvPlace& place, const KvRegion& region,
                               TransferPlan& plan) const {
  plan_sharded_transfer(routes.at(peer).to, views(kv), remote_views(peer, place), region, plan);
}

void InstanceParts::plan_read(InstanceId peer, const KvPlace& place, KvHandle kv, const KvRegion& region,
                              TransferPlan& plan) const {
  plan_sharded_transfer(routes.at(peer).from, remote_views(peer, place), views(kv), region, plan);
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
  return {nullptr, [this, attempt, stage](void*) { parts_.tell(kConductor, AttemptProgress{attempt, stage}); }};
}

// Flags that no sequence holds are kept only while a message that names their attempt may be on its way.
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

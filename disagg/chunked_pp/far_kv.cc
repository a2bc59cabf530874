#include "disagg/chunked_pp/far_kv.h"

#include <utility>
#include <vector>

#include "disagg/transport/forwarding.h"

namespace xpyd::disagg::ranks {

void FarQueue::copy(std::span<const Copy> copies, bool) {
  std::vector<Copies> of_stages(size_t(pipeline_.stages()));
  for (const Copy& copy : copies) {
    const RemotePipeline::KvAddress from = pipeline_.find(copy.source), to = pipeline_.find(copy.destination);
    XPYD_CHECK(from.stage == to.stage && from.rank == to.rank);
    Copies& all = of_stages[size_t(from.stage)];
    all.pieces.push_back({uint32_t(from.rank), from.at, to.at, copy.bytes});
    if (all.pieces.size() < kMaxPieces) continue;
    pipeline_.tell(from.stage, all);
    all.pieces.clear();
  }
  for (int stage = 0; stage < pipeline_.stages(); ++stage)
    if (const Copies& all = of_stages[size_t(stage)]; !all.pieces.empty()) pipeline_.tell(stage, all);
}

namespace {

class FarWire final : public ForwardingTransport {
 public:
  FarWire(std::unique_ptr<KvTransport> inner, RemotePipeline& pipeline, Clock& clock)
      : ForwardingTransport(std::move(inner)), pipeline_(pipeline), clock_(clock) {
    pipeline_.listen_to_kv(
        [this](int stage, uint16_t type, std::string_view bytes) { return heard(stage, type, bytes); });
  }
  ~FarWire() override { pipeline_.listen_to_kv(nullptr); }

  Result<bool> connect(PeerId peer, const std::string& address) override {
    Result<bool> here = inner().connect(peer, address);
    if (!here) return here;
    std::lock_guard lock(mutex_);
    auto [at, fresh] = meetings_.try_emplace(peer);
    if (fresh)
      for (int stage = 0; stage < pipeline_.stages(); ++stage) pipeline_.tell(stage, Meet{uint32_t(peer), address});
    if (!at->second.error.empty()) {
      Error error{ErrorCode::unavailable, at->second.error};
      meetings_.erase(at);
      return error;
    }
    return here.value() && int(at->second.stages.size()) == pipeline_.stages();
  }
  void disconnect(PeerId peer) override {
    inner().disconnect(peer);
    std::lock_guard lock(mutex_);
    meetings_.erase(peer);
    for (int stage = 0; stage < pipeline_.stages(); ++stage) pipeline_.tell(stage, Leave{uint32_t(peer)});
  }
  Result<WindowKey> open(PeerId, KvOp, std::span<const MemoryRange>) override {
    return Error{ErrorCode::unavailable,
                 "the KV of this instance is on the hosts of its ranks, where nobody else reads "
                 "or writes: expected --kv-transfer push, and this instance as P or C"};
  }
  TransferId post(const KvTransfer& what, const TransferPlan& plan) override {
    const TransferId id = ++last_id_;
    ++stats_.posts;
    Post post{.id = uint64_t(id),
              .peer = uint32_t(what.peer),
              .window = what.window,
              .seconds = what.deadline_s > 0 ? std::max(1e-3, what.deadline_s - clock_.now()) : 0,
              .pieces = {}};
    int stage = -1;
    bool sent = what.op == KvOp::write && !plan.copies.empty();
    for (const Copy& copy : plan.copies) {
      if (post.pieces.size() == kMaxPieces) {
        post.more = true;
        sent = sent && pipeline_.tell(stage, post);
        post.pieces.clear();
        post.more = false;
      }
      const RemotePipeline::KvAddress from = pipeline_.find(copy.source);
      XPYD_CHECK(stage < 0 || stage == from.stage);
      stage = from.stage;
      post.pieces.push_back({uint32_t(from.rank), from.at, reinterpret_cast<uint64_t>(copy.destination), copy.bytes});
    }
    std::lock_guard lock(mutex_);
    sent = sent && pipeline_.tell(stage, post);
    posts_[id] = {stage, sent ? TransferState::in_flight : TransferState::failed, int64_t(plan.bytes),
                  int64_t(plan.copies.size())};
    return id;
  }
  TransferState poll(TransferId id) override {
    std::lock_guard lock(mutex_);
    const auto at = posts_.find(id);
    XPYD_CHECK(at != posts_.end(), "poll of a transfer that is not known");
    const Posting& posting = at->second;
    const TransferState state = posting.state;
    if (state == TransferState::in_flight) return state;
    if (state == TransferState::done)
      stats_.bytes += posting.bytes, stats_.descriptors += posting.descriptors;
    else
      ++stats_.failed;
    posts_.erase(at);
    return state;
  }
  void cancel(TransferId id) override {
    std::lock_guard lock(mutex_);
    if (const auto at = posts_.find(id); at != posts_.end() && at->second.state == TransferState::in_flight)
      pipeline_.tell(at->second.stage, Cancel{uint64_t(id)});
  }
  TransportStats stats() const override {
    TransportStats stats = stats_;
    stats.refused = inner().stats().refused;
    return stats;
  }

 private:
  struct Meeting {
    std::set<int> stages;  // that are connected
    std::string error;
  };
  struct Posting {
    int stage = 0;
    TransferState state = TransferState::in_flight;
    int64_t bytes = 0, descriptors = 0;
  };

  Status heard(int stage, uint16_t type, std::string_view bytes) {
    std::lock_guard lock(mutex_);
    if (type == kType<Met>) {
      const Result<Met> met = from_bytes<Met>(bytes);
      if (!met) return met.error();
      const auto at = meetings_.find(PeerId(met.value().peer));
      if (at == meetings_.end()) return ok();
      if (met.value().error.empty())
        at->second.stages.insert(stage);
      else
        at->second.error = "rank " + std::to_string(stage) + ": " + met.value().error;
      return ok();
    }
    const Result<Posted> posted = from_bytes<Posted>(bytes);
    if (!posted) return posted.error();
    if (const auto at = posts_.find(TransferId(posted.value().id)); at != posts_.end() && at->second.stage == stage)
      at->second.state = posted.value().done ? TransferState::done : TransferState::failed;
    return ok();
  }

  RemotePipeline& pipeline_;
  Clock& clock_;
  TransferId last_id_ = 0;
  TransportStats stats_;
  std::mutex mutex_;  // guards what follows
  std::map<PeerId, Meeting> meetings_;
  std::map<TransferId, Posting> posts_;
};

}  // namespace

std::unique_ptr<KvTransport> make_far_wire(std::unique_ptr<KvTransport> inner, RemotePipeline& pipeline, Clock& clock) {
  return std::make_unique<FarWire>(std::move(inner), pipeline, clock);
}

}  // namespace xpyd::disagg::ranks

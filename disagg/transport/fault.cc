#include "disagg/transport/fault.h"

#include <algorithm>
#include <charconv>
#include <map>

#include "base/numbers.h"
#include "base/random.h"
#include "disagg/transport/forwarding.h"

namespace xpyd::disagg {
namespace {

constexpr double kHoldSeconds = 1e-3;  // of a reordered transfer, if none follows

class FaultTransport final : public ForwardingTransport {
 public:
  FaultTransport(std::unique_ptr<KvTransport> inner, const FaultOptions& faults, const TransportOptions& options)
      : ForwardingTransport(std::move(inner)),
        faults_(faults),
        clock_(*options.clock),
        random_(faults.seed * 0x9e3779b97f4a7c15u + uint64_t(options.self)) {}

  void disconnect(PeerId peer) override {
    for (auto& [id, post] : posts_)
      if (post.transfer.peer == peer) post.lost = true;
    inner().disconnect(peer);
  }
  Result<RemoteKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) override {
    pump();
    return inner().open(peer, op, ranges);
  }
  bool close(const RemoteKey& registration) override {
    pump();
    return inner().close(registration);
  }

  TransferId post(const KvTransfer& transfer, const TransferPlan& plan) override {
    const TransferId id = ++last_id_;
    ++stats_posts_;
    Transfer& post = posts_[id];
    post.transfer = transfer;
    post.plan = plan;
    post.due_s = clock_.now();
    // Every transfer draws the same random numbers, whatever happens to it.
    const auto happens = [this](double probability) { return random_.uniform() < probability; };
    post.dropped = happens(faults_.drop);
    if (const double late = random_.exponential() * faults_.delay_s; late > 0) post.due_s += late, ++counts_.delayed;
    if (happens(faults_.reorder)) post.behind = true, ++counts_.reordered;
    counts_.dropped += post.dropped;
    pump(id);
    return id;
  }

  TransferState poll(TransferId id) override {
    pump();
    auto at = posts_.find(id);
    XPYD_CHECK(at != posts_.end(), "poll of a transfer that is not known");
    Transfer& post = at->second;
    TransferState state = TransferState::in_flight;
    if (post.inner) {
      state = inner().poll(*post.inner);
    } else {
      const double deadline_s = post.transfer.deadline_s;
      const bool late = deadline_s > 0 && clock_.now() >= deadline_s;
      // A dropped transfer without a deadline fails at once.
      if (post.lost || late || (post.dropped && deadline_s <= 0)) state = TransferState::failed;
    }
    if (state == TransferState::in_flight) return state;
    stats_failed_ += state == TransferState::failed;
    posts_.erase(at);
    return state;
  }

  void cancel(TransferId id) override {
    auto at = posts_.find(id);
    if (at == posts_.end()) return;
    if (at->second.inner)
      inner().cancel(*at->second.inner);
    else
      at->second.lost = true;
  }

  TransportStats stats() const override {
    TransportStats stats = inner().stats();
    stats.posts = stats_posts_;
    stats.failed = stats_failed_;
    return stats;
  }
  const FaultCounts& counts() const { return counts_; }

 private:
  struct Transfer {
    KvTransfer transfer;
    TransferPlan plan;
    double due_s = 0;
    bool dropped = false, behind = false;
    bool lost = false;                // cancelled, or its peer disconnected, before it began
    std::optional<TransferId> inner;  // set once it has begun
  };

  void begin(Transfer& post) { post.inner = inner().post(post.transfer, post.plan); }

  // Begins the transfers that are due. `newest`: a new transfer, for which reordered ones may have waited.
  void pump(TransferId newest = 0) {
    const double now = clock_.now();
    for (auto& [id, post] : posts_) {
      if (post.inner || post.dropped || post.lost || now < post.due_s) continue;
      if (post.behind && id >= newest && now < post.due_s + kHoldSeconds) continue;
      if (post.behind && newest > 0 && id < newest && !posts_[newest].behind) begin_newest(newest);
      begin(post);
    }
  }
  void begin_newest(TransferId newest) {
    Transfer& post = posts_[newest];
    if (!post.inner && !post.dropped && clock_.now() >= post.due_s) begin(post);
  }

  const FaultOptions faults_;
  Clock& clock_;
  Random random_;
  std::map<TransferId, Transfer> posts_;  // in order: transfers that are due together begin in order
  TransferId last_id_ = 0;
  int64_t stats_posts_ = 0, stats_failed_ = 0;
  FaultCounts counts_;
};

constexpr const char* kExpected =
    "expected fault:TRANSPORT,KEY=VALUE,... with drop, reorder (probabilities from 0 to 1), delay (such as 2ms; units "
    "s, "
    "ms, us) or seed (a whole number)";

bool parse_number(std::string_view text, double& value, std::string_view& rest) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  rest = text.substr(size_t(end - text.data()));
  return error == std::errc() && value >= 0;
}

std::string parse_item(std::string_view item, FaultOptions& faults) {
  const size_t equals = item.find('=');
  const std::string_view key = item.substr(0, equals), value = equals == item.npos ? "" : item.substr(equals + 1);
  if (key == "seed") return read_number(value, faults.seed) ? "" : "seed is not a whole number";
  double number = 0;
  std::string_view unit;
  if (key == "delay") {
    if (!parse_number(value, number, unit)) return "delay is not a time";
    const double scale = unit == "s" ? 1 : unit == "ms" ? 1e-3 : unit == "us" ? 1e-6 : 0;
    if (scale == 0) return "delay needs a unit (s, ms, us)";
    faults.delay_s = number * scale;
    return "";
  }
  const std::pair<std::string_view, double*> probabilities[] = {{"drop", &faults.drop}, {"reorder", &faults.reorder}};
  for (const auto& [name, place] : probabilities) {
    if (key != name) continue;
    if (!parse_number(value, number, unit) || !unit.empty() || !(number <= 1))
      return std::string(name) + " is not a probability from 0 to 1";
    *place = number;
    return "";
  }
  return "there is no fault named \"" + std::string(key) + "\"";
}

}  // namespace

std::unique_ptr<KvTransport> make_fault_transport(std::unique_ptr<KvTransport> inner, const FaultOptions& faults,
                                                  const TransportOptions& options) {
  return std::make_unique<FaultTransport>(std::move(inner), faults, options);
}

const FaultCounts* fault_counts(const KvTransport& transport) {
  const auto* fault = dynamic_cast<const FaultTransport*>(&transport);
  return fault ? &fault->counts() : nullptr;
}

Result<std::unique_ptr<KvTransport>> TransportChoice::make(const TransportOptions& options) const {
  auto made = row->make(options);
  if (!made.ok() || !faults) return made;
  return make_fault_transport(std::move(made).value(), *faults, options);
}

Result<TransportChoice> parse_transport(std::string_view text) {
  const std::string given = "--transport " + std::string(text) + ": ";
  constexpr std::string_view kFault = "fault:";
  const bool faulty = text.starts_with(kFault) || text == "fault";
  std::string_view rest = text.substr(std::min(text.size(), faulty ? kFault.size() : 0));
  const std::string_view name = faulty ? rest.substr(0, rest.find(',')) : rest;
  TransportChoice choice{.row = find_transport(name)};
  if (!choice.row) {
    std::string names;
    for (const TransportRow& row : transports()) names += std::string(" ") + row.name;
    return invalid(given + "there is no transport named \"" + std::string(name) + "\"; expected one of" + names +
                   ", or fault:TRANSPORT,... with one of them");
  }
  if (!faulty) return choice;
  if (choice.row->shared_pool) return invalid(given + "this transport moves no bytes, so no fault can be injected");
  choice.faults.emplace();
  for (rest.remove_prefix(name.size()); !rest.empty();) {
    rest.remove_prefix(1);
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(item.size());
    if (const std::string wrong = parse_item(item, *choice.faults); !wrong.empty())
      return invalid(given + wrong + "; " + kExpected);
  }
  return choice;
}

}  // namespace xpyd::disagg

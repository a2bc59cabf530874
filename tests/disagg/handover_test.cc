// The two state machines of a hand-over (disagg/handover/states.h). A random walk of both sides, over a transport and a
// network that lose and reorder, goes through every pair of a state and an event that can occur, and leaves nothing
// behind.

#include <algorithm>
#include <fstream>
#include <optional>

#include "base/random.h"
#include "disagg/handover/kv_room.h"
#include "disagg/handover/receiver.h"
#include "disagg/handover/sender.h"
#include "disagg/handover/states.h"
#include "disagg/messages.h"
#include "tests/catch.h"
#include "tests/disagg/checksum_model.h"
#include "tests/tiny_model.h"
#include "tests/wrapped_transport.h"

namespace xpyd::testing::handover_test {

using namespace handover;

// By any number of events.
bool leads_to(const auto& machine, auto from, auto to) {
  std::vector<decltype(from)> seen{from};
  for (size_t i = 0; i < seen.size(); ++i)
    for (size_t e = 0; size_t(seen[i]) < machine.kStates && e < machine.kEvents; ++e) {
      const auto& step = machine.steps[size_t(seen[i])][e];
      if (!step.can_be || std::ranges::count(seen, step.next) > 0) continue;
      if (step.next == to) return true;
      seen.push_back(step.next);
    }
  return false;
}

TEST_CASE("handover: the README's drawing is that of the tables", "[disagg][handover]") {
  std::ifstream file("disagg/handover/README.md");
  const std::string readme{std::istreambuf_iterator<char>(file), {}};
  const size_t begin = readme.find("```\n            conductor"), end = readme.find("```", begin + 3);
  REQUIRE(end != readme.npos);
  const std::string drawing = readme.substr(begin, end - begin);
  // The states stand one under another, and each is reached from the one before.
  size_t at = 0;
  std::optional<ReceiverState> before;
  for (ReceiverState state : {ReceiverState::remote_prefilling, ReceiverState::granted,
                              ReceiverState::finished_prefills, ReceiverState::finished_transfers}) {
    at = drawing.find(name(state), at);
    REQUIRE(at != drawing.npos);
    if (before) CHECK(leads_to(kReceiverTable, *before, state));
    if (before) CHECK_FALSE(leads_to(kReceiverTable, state, *before));
    before = state;
  }
  CHECK(drawing.find(name(SenderState::prefill_sending)) != drawing.npos);
  CHECK(leads_to(kSenderTable, SenderState::writing, SenderState::prefill_sending));
  CHECK_FALSE(leads_to(kSenderTable, SenderState::prefill_sending, SenderState::writing));
}

constexpr double kLease = 0.4;
constexpr InstanceId kP = 0, kD = 1;

// The local transport. Its transfers arrive, fail or are lost at random.
class RandomTransport final : public FlyingTransport {
 public:
  RandomTransport(const TransportOptions& options, bool zero_copy, Random& random)
      : FlyingTransport(options), zero_copy_(zero_copy), random_(random) {}
  bool zero_copy() const override { return zero_copy_; }
  Result<RemoteKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) override {
    if (random_.uniform() < 0.1) return Error{ErrorCode::unavailable, "no window today"};
    return WrappedTransport::open(peer, op, ranges);
  }
  bool close(const RemoteKey& registration) override {
    return (calm || random_.uniform() < 0.5) && WrappedTransport::close(registration);
  }
  // A copy in progress ends some time after it is cancelled.
  void cancel(TransferId id) override {
    if (calm || random_.uniform() < 0.5) FlyingTransport::cancel(id);
  }
  bool calm = false;

 private:
  void looked_at(Flight& flight) override {
    const double fate = random_.uniform();
    if (!calm && fate >= 0.4) return;
    flight.state = fate < 0.1 ? TransferState::failed : TransferState::done;
    if (fate >= 0.15) arrive(flight);  // else it fails or is lost
  }
  const bool zero_copy_;
  Random& random_;
};

// A memory that says at random that an offload tier is loading a sequence.
class LoadingMemory final : public KvMemory, public KvLoader {
 public:
  LoadingMemory(std::unique_ptr<KvMemory> inner, Random& random)
      : KvMemory(inner->name(), inner->places(), {inner->leases(), inner->cache(), nullptr, this}),
        inner_(std::move(inner)),
        random_(random) {}
  Result<KvReservation> reserve(std::span<const int32_t> tokens, uint64_t salt) override {
    Result<KvReservation> reserved = inner_->reserve(tokens, salt);
    if (reserved && random_.uniform() < 0.3) return KvReservation{reserved.value().handle, 0, true};
    return reserved;
  }
  bool ready(KvHandle) override { return random_.uniform() < 0.7; }
  int matched_tokens(std::span<const int32_t> tokens, uint64_t salt) const override {
    return inner_->probe(tokens, salt);
  }
  bool poll() override { return false; }
  bool copying() const override { return false; }
  bool append(KvHandle handle, int n_tokens) override { return inner_->append(handle, n_tokens); }
  void commit(KvHandle handle, std::span<const int32_t> tokens) override { inner_->commit(handle, tokens); }
  void rollback(KvHandle handle) override { inner_->rollback(handle); }
  Result<KvHandle> fork(KvHandle handle) override { return inner_->fork(handle); }
  void free(KvHandle handle) override { inner_->free(handle); }
  KvView view(KvHandle handle, int rank) const override { return inner_->view(handle, rank); }
  KvHeld held(KvHandle handle) const override { return inner_->held(handle); }
  KvStats stats() const override { return inner_->stats(); }
  void check_invariants(bool complete) const override { inner_->check_invariants(complete); }

 private:
  std::unique_ptr<KvMemory> inner_;
  Random& random_;
};

// The parts of one instance. The walk decides when each of them runs.
struct Side {
  Side(InstanceId self, KvOptions kv, std::shared_ptr<KvPool> pool, bool zero_copy, DisaggOrder order,
       VirtualClock& clock, MessageBus& bus, Random& random, Visits& visits)
      : memory(find_kv_scheme("paged")->make(pool ? pool : make_block_pool("paged", kv).value(), kv)),
        model(make_checksum_model()),
        leases(kLease, clock) {
    if (!zero_copy) memory = std::make_unique<LoadingMemory>(std::move(memory), random);
    const TransportOptions options{.regions = {{memory->base(), memory->layout().pool_bytes()}},
                                   .queue = &cpu_queue(),
                                   .clock = &clock,
                                   .self = self};
    transport = std::make_unique<RandomTransport>(options, zero_copy, random);
    parts = std::make_unique<InstanceParts>(InstanceParts{.self = self,
                                                          .memory = *memory,
                                                          .transport = *transport,
                                                          .clock = clock,
                                                          .bus = bus,
                                                          .n_layers = model->config().n_layers,
                                                          .order = order,
                                                          .lease_s = kLease,
                                                          .visits = &visits});
    attempts = std::make_unique<Attempts>(*parts);
    engine = std::make_unique<Engine>(
        *model, *memory, EngineOptions{.policy = find_batch_policy("chunked"), .max_batch = 4, .step_tokens = 16},
        clock, nullptr);
    room = std::make_unique<KvRoom>(*memory, *engine);
  }
  void meet(const Side& peer) {
    REQUIRE(transport->connect(peer.parts->self, peer.transport->address()).value());
    parts->peers.add(peer.parts->self, peer.memory->layout(), shards_of(*peer.memory));
  }
  std::unique_ptr<KvMemory> memory;
  std::unique_ptr<Model> model;
  std::unique_ptr<RandomTransport> transport;
  std::unique_ptr<InstanceParts> parts;
  Leases leases;
  std::unique_ptr<Attempts> attempts;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<KvRoom> room;
};

class Walk final : public MessageBus {
 public:
  Walk(uint64_t seed, Visits& visits) : random_(seed), zero_copy_(seed % 3 == 0) {
    if (zero_copy_ && order_ == DisaggOrder::pull) order_ = DisaggOrder::push;
    KvOptions kv{.shape = kv_shape(checksum_config(), Dtype::f32), .block_tokens = 4, .max_sequence_tokens = 64};
    kv.pool_bytes = 160 * kv.shape.token_bytes();
    std::shared_ptr<KvPool> shared;
    if (zero_copy_) {
      kv.n_memories = 2;
      kv.pool_bytes *= 2;
      shared = make_block_pool("paged", kv).value();
    }
    p_ = std::make_unique<Side>(kP, kv, shared, zero_copy_, order_, clock_, *this, random_, visits);
    d_ = std::make_unique<Side>(kD, kv, shared, zero_copy_, order_, clock_, *this, random_, visits);
    p_->meet(*d_);
    d_->meet(*p_);
    sender_ = std::make_unique<Sender>(*p_->parts, p_->leases, StreamKv(random_.below(3)));
    receiver_ = std::make_unique<Receiver>(*d_->parts, *d_->attempts, *d_->room, *d_->engine);
  }

  void run(int steps) {
    for (int i = 0; i < steps; ++i) step();
    if (chance(0.5)) {
      sender_->clear(FinishReason::abort, "");
      return receiver_->clear(FinishReason::abort, "");
    }
    calm_down();
  }

  void send(InstanceId from, InstanceId to, Message message) override {
    if (to != kConductor) {
      mail_.push_back({from, to, std::move(message)});
    } else if (auto* job = std::get_if<PrefillJob>(&message)) {
      jobs_.push_back(std::move(*job));
    } else if (auto* failed = std::get_if<AttemptFailed>(&message); failed && chance(0.7)) {
      abort(failed->attempt);
    }
  }

 private:
  // A prompt that P's engine computes.
  struct Prompt {
    SequencePtr sequence;
    int layers = -1;  // layers that are computed; below 0: not begun
  };
  bool chance(double p) { return random_.uniform() < p; }
  template <class List>
  size_t one_of(const List& list) {
    return size_t(random_.below(list.size()));
  }
  // One of the latest attempts, or the next one.
  AttemptId some_attempt() {
    const size_t n = requests_.size() + 1;
    return n - random_.below(std::min<size_t>(n, 6));
  }
  void abort(AttemptId attempt) {
    p_->attempts->abort(attempt);
    d_->attempts->abort(attempt);
  }

  void step() {
    clock_.seconds += chance(0.02) ? 1.1 * kLease : 0.01 * random_.uniform();
    switch (random_.below(16)) {
      case 0: return chance(0.5) ? ask() : void();
      case 1:
        if (jobs_.empty()) return;
        compute(jobs_.back().attempt);
        return jobs_.pop_back();
      case 2: return peers_come_and_go();
      case 3: return chance(0.1) ? abort(some_attempt()) : lie();
      case 4: return renew();
      case 5:
      case 6: d_->engine->step(); return;
      case 7: sender_->tick(); return;
      case 8: receiver_->tick(); return;
      case 9: return lie(), deliver();
      case 10:
      case 11:
      case 12:
      case 13: return deliver();
      default: return compute_on();
    }
  }

  void ask() {
    std::vector<int32_t> prompt(1 + random_.below(40));
    for (int32_t& token : prompt) token = int32_t(random_.below(3));
    const AttemptId attempt = requests_.size() + 1;
    auto request = tiny_request(attempt, prompt, 3);
    request->ignore_eos = true;
    if (chance(0.2)) request->deadline_s = clock_.seconds + 0.2 * random_.uniform();
    requests_.push_back(request);
    if (order_ == DisaggOrder::decode_first)
      receiver_->start({attempt, request, {}, true});
    else
      compute(attempt);
  }
  void compute(AttemptId attempt) {
    if (sender_->has(attempt)) return;
    auto request = std::make_shared<Request>(*requests_[attempt - 1]);
    if (order_ == DisaggOrder::decode_first) request->prompt.pop_back();
    SequencePtr sequence = p_->attempts->begin(attempt, request, {}, true);
    sequence->attempt = attempt;
    sequence->leaves = true;
    sender_->expect(attempt, kD);
    prompts_.push_back({std::move(sequence)});
  }

  // One prompt gets on, a layer at a time, as in an engine (batch/engine/engine.cc).
  void compute_on() {
    if (prompts_.empty()) return;
    const size_t at = one_of(prompts_);
    Prompt& prompt = prompts_[at];
    Sequence& s = *prompt.sequence;
    const int n = s.given, n_layers = p_->model->config().n_layers;
    if (chance(0.05) || s.cancelled->load()) return end(at);
    if (prompt.layers < 0) {
      Result<KvReservation> reserved = p_->memory->reserve(s.tokens, 0);
      if (!reserved) return;
      s.kv = reserved.value().handle;
      s.computed = p_->memory->written_tokens(s.kv);
      if (!p_->memory->append(s.kv, n - s.computed)) return p_->memory->free(std::exchange(s.kv, kNoKv));
      prompt.layers = 0;
      sender_->prefill_started(s);
      if (s.computed > 0) sender_->kv_written(s, 0, n_layers, 0, s.computed);
    } else if (prompt.layers < n_layers) {
      sender_->kv_written(s, prompt.layers, prompt.layers + 1, s.computed, n);
      ++prompt.layers;
    } else {
      p_->memory->commit(s.kv, std::span(s.tokens).subspan(size_t(s.computed)));
      s.tokens.push_back(1);
      std::vector<SequencePtr> choices;
      choices.push_back(std::move(prompt.sequence));
      prompts_.erase(prompts_.begin() + long(at));
      sender_->prefill_done(std::move(choices));
    }
  }
  void end(size_t at) {
    Sequence& s = *prompts_[at].sequence;
    if (s.kv != kNoKv) p_->memory->free(std::exchange(s.kv, kNoKv));
    sender_->prefill_cancelled(s);
    prompts_.erase(prompts_.begin() + long(at));
  }

  void peers_come_and_go() {
    for (Side* side : {p_.get(), d_.get()}) {
      const InstanceId peer = kP + kD - side->parts->self;
      if (side->parts->peers.empty()) {
        side->meet(side == p_.get() ? *d_ : *p_);
      } else if (chance(0.1)) {
        side == p_.get() ? sender_->peer_gone(peer) : receiver_->peer_gone(peer);
        side->parts->peers.erase(peer);
      }
    }
  }

  // One of the messages under way arrives, or is lost. A message that owns blocks is not lost.
  void deliver() {
    if (mail_.empty()) return;
    const size_t at = chance(0.3) ? mail_.size() - 1 : one_of(mail_);
    Envelope envelope = std::move(mail_[at]);
    mail_.erase(mail_.begin() + long(at));
    const auto* owner = std::get_if<KvDelivered>(&envelope.message);
    if (!(owner && owner->handover) && chance(0.05)) return;
    std::visit(
        [&](auto& m) {
          if constexpr (requires { sender_->handle(kD, std::move(m)); })
            if (envelope.to == kP) sender_->handle(kD, std::move(m));
          if constexpr (requires { receiver_->handle(kP, std::move(m)); })
            if (envelope.to == kD) receiver_->handle(kP, std::move(m));
        },
        envelope.message);
  }
  // Sends a message that comes at the wrong time.
  void lie() {
    const AttemptId attempt = some_attempt();
    if (attempt > requests_.size()) return;
    const auto say = [&](InstanceId to, Message message) { mail_.push_back({kP + kD - to, to, std::move(message)}); };
    switch (random_.below(6)) {
      case 0: return say(kP, KvTaken{attempt});
      case 1: return say(kP, ReservationCancelled{attempt});
      case 2: return say(kD, ReservationCancelled{attempt});
      case 3: return say(kD, ReserveKv{attempt, requests_[attempt - 1], {}});
      case 4: {
        KvReserved reserved{.attempt = attempt};
        for (int32_t block = 0; block < 10; ++block) reserved.destination.blocks.push_back(block);
        return say(kP, std::move(reserved));
      }
      default: {
        KvDelivered delivered{.attempt = attempt, .kv_arrived = chance(0.7)};
        delivered.choices.emplace_back().output = {1};
        return say(kD, std::move(delivered));
      }
    }
  }
  void renew() {
    SharedAttempts of_p, of_d;
    sender_->add_shared(of_p);
    receiver_->add_shared(of_d);
    if (chance(0.8))
      for (AttemptId attempt : of_p[kD]) receiver_->renewed(kP, attempt);
    if (chance(0.8))
      for (AttemptId attempt : of_d[kP]) sender_->renewed(kD, attempt);
  }

  // After the last message, memory that nobody owns is free within a lease.
  void calm_down() {
    p_->transport->calm = d_->transport->calm = true;
    while (!prompts_.empty()) end(0);
    for (AttemptId attempt = 1; attempt <= requests_.size(); ++attempt) abort(attempt);
    while (zero_copy_ && !mail_.empty()) deliver();
    for (int i = 0; i < 40; ++i) {
      clock_.seconds += kLease / 8;
      sender_->tick();
      receiver_->tick();
      d_->engine->step();
    }
    CHECK(sender_->empty());
    CHECK(receiver_->empty());
    CHECK(d_->engine->idle());
    for (const Side* side : {p_.get(), d_.get()}) {
      side->memory->check_invariants(!zero_copy_);
      const KvStats kv = side->memory->stats();
      CHECK(kv.free + kv.cached == kv.capacity);
    }
  }

  VirtualClock clock_;
  Random random_;
  const bool zero_copy_;
  DisaggOrder order_ = DisaggOrder(1 + random_.below(3));
  std::unique_ptr<Side> p_, d_;
  std::unique_ptr<Sender> sender_;
  std::unique_ptr<Receiver> receiver_;
  std::vector<std::shared_ptr<const Request>> requests_;  // [attempt - 1]
  std::vector<Prompt> prompts_;
  std::vector<PrefillJob> jobs_;
  std::vector<Envelope> mail_;
};

// Returns the pairs that can occur and did not, or did and cannot.
template <class State, class Event, class Action>
std::string amiss(const Machine<State, Event, Action>& machine,
                  const typename Machine<State, Event, Action>::Visits& visits) {
  std::string text;
  for (size_t s = 0; s < visits.size(); ++s)
    for (size_t e = 0; e < visits[s].size(); ++e)
      if ((visits[s][e] > 0) != machine.steps[s][e].can_be)
        text += std::string(name(State(s))) + ", " + std::string(name(Event(e))) + ": " + std::to_string(visits[s][e]) +
                "\n";
  return text;
}

TEST_CASE("handover: a random walk of both sides visits every pair that can occur, and leaves nothing behind",
          "[disagg][handover]") {
  Visits visits;
  const auto all = [&] { return amiss(kSenderTable, visits.sender) + amiss(kReceiverTable, visits.receiver); };
  for (uint64_t seed = 1; seed <= 500 || (seed <= 10000 && all() != ""); ++seed) {
    INFO("seed " << seed);
    Walk(seed, visits).run(300);
  }
  CHECK(all() == "");
}

}  // namespace xpyd::testing::handover_test

#include "disagg/instance/instance.h"

#include <algorithm>
#include <utility>

namespace xpyd::disagg {

Instance::Instance(InstanceOptions options, std::unique_ptr<Model> model, std::shared_ptr<KvMemory> memory,
                   std::unique_ptr<KvTransport> transport, Clock& clock, MessageBus& bus)
    : options_(std::move(options)),
      model_(std::move(model)),
      memory_(std::move(memory)),
      transport_(std::move(transport)),
      bus_(bus),
      parts_{.self = options_.id,
             .memory = *memory_,
             .transport = *transport_,
             .clock = clock,
             .bus = bus_,
             .tokenizer = options_.engine.tokenizer,
             .n_layers = model_->config().n_layers,
             .order = options_.order,
             .post_by_stage = options_.post_by_stage ? std::optional(shards_of(*memory_)) : std::nullopt,
             .lease_s = options_.lease_s,
             .visits = options_.visits},
      leases_(options_.lease_s, clock),
      sender_(parts_, leases_, options_.stream_kv),
      engine_(*model_, *memory_, options_.engine, clock, &sender_),
      kv_{.attempts = Attempts(parts_),
          .sender = sender_,
          .room = {*memory_, engine_},
          .receiver = {parts_, kv_.attempts, kv_.room, engine_},
          .reservations = {parts_, sender_, kv_.room, engine_, 2l * model_->stages() * options_.engine.step_tokens},
          .fetcher = {parts_, kv_.attempts, kv_.room,
                      [this](StartRequest message, KvHandle kv, int tokens) { begin(std::move(message), kv, tokens); }},
          .lender = pool::Lender(parts_)},
      peers_(options_, parts_),
      costs_(options_, engine_, clock),
      status_(options_, parts_, engine_, kv_) {
  if (options_.log) watch();
  status_.publish(costs_.terms());
}

InstanceInfo Instance::info() const {
  const KvStats kv = memory_->stats();
  return {.id = options_.id,
          .name = options_.name,
          .role = options_.role,
          .layout = memory_->layout(),
          .shards = shards_of(*memory_),
          .stages = engine_.in_waves() ? model_->stages() : 1,
          .capacity_blocks = kv.capacity,
          .block_tokens = kv.block_tokens,
          .tier_blocks = int(std::min<int64_t>(1 << 30, kv.tiers.host_capacity + kv.tiers.disk_capacity)),
          .max_batch = options_.engine.max_batch,
          .address = transport_->address()};
}

void Instance::send(InstanceId from, Message message) {
  leases_.put({from, options_.id, std::move(message)});
  if (engine_.in_waves()) model_->interrupt();  // a message interrupts the wait for a wave
}

bool Instance::turn() {
  bool moved = peers_.connect();
  std::vector<Envelope>& inbox = leases_.take();
  std::vector<Envelope> waiting;
  for (size_t i = 0; i < inbox.size(); ++i) {
    Envelope& envelope = inbox[i];
    if (peers_.waits(envelope, kv_.attempts)) {
      // The conductor is told that the job has started. Otherwise its queue would stop for all decode instances.
      if (const auto* job = std::get_if<PrefillJob>(&envelope.message); job && i >= n_waiting_)
        parts_.tell(kConductor, AttemptProgress{job->attempt, AttemptProgress::started});
      waiting.push_back(std::move(envelope));
      continue;
    }
    std::visit([&](auto& m) { handle(envelope.from, std::move(m)); }, envelope.message);
    moved = true;
  }
  n_waiting_ = waiting.size();
  inbox = std::move(waiting);
  moved |= kv_.tick();
  // These attempts stand now, and stand until the step is over.
  if (options_.lease_s > 0) leases_.update(kv_.shared());
  status_.charge_transfers();
  if (!engine_.in_waves()) bus_.hold();  // a step of waves may block after it has sent first tokens
  moved |= engine_.step();
  if (const std::optional<StepCosts::Took> took = costs_.turn()) {
    status_.saw(*took);
    if (options_.log) log_step(*took);
  }
  status_.report_cache();
  status_.publish(costs_.terms());
  const bool became_idle = status_.became_idle(idle());
  const bool tell_counters = options_.lease_s > 0 && (bus_.has_answers() || became_idle);
  bus_.release(options_.id,
               tell_counters ? std::optional<Message>(Report{std::make_shared<InstanceStats>(stats())}) : std::nullopt);
  return moved;
}

void Instance::run(const std::atomic<bool>& stop) {
  while (!stop.load(std::memory_order_relaxed)) {
    const bool moved = turn();
    costs_.back_to_back(moved);
    if (moved) continue;
    double nap = idle() ? 0.1 : counts_posts() ? 0.0001 : 0.0005;
    if (options_.lease_s > 0) nap = std::min(nap, options_.lease_s / 8);
    leases_.mailbox().wait(peers_.nap(nap));
  }
}

void Instance::handle(InstanceId, StartRequest message) {
  if (message.remote && parts_.order == DisaggOrder::decode_first) return kv_.receiver.start(std::move(message));
  if (message.fetch.holder >= 0) return kv_.fetcher.start(std::move(message));
  begin(std::move(message), kNoKv, 0);
}

// Submits the prompt. `kv` holds its first `tokens` tokens; kNoKv: nothing is there.
void Instance::begin(StartRequest message, KvHandle kv, int tokens) {
  SequencePtr sequence = kv_.attempts.begin(message.attempt, std::move(message.request), message.state);
  if (kv != kNoKv) {
    sequence->kv = kv;
    sequence->computed = tokens;
    sequence->early = sequence->probed = true;
  }
  compute(std::move(sequence), message.remote, message.decode);
}

void Instance::compute(SequencePtr sequence, bool leaves, InstanceId decode) {
  const AttemptId attempt = sequence->attempt;
  sequence->queue_ticket = kv_.attempts.ticket(attempt, AttemptProgress::started);
  sequence->prompt_ticket = kv_.attempts.ticket(attempt, AttemptProgress::prompt_done);
  sequence->leaves = leaves;
  if (leaves) sender_.expect(attempt, decode);
  if (leaves && options_.reserve_blocks) return kv_.reservations.start(std::move(sequence), decode);
  engine_.submit(std::move(sequence));
}

// decode_first: computes all but the prompt's last token. The decode instance computes that one and samples from its
// logits; the token sampled here is discarded.
void Instance::handle(InstanceId, PrefillJob message) {
  auto request = std::make_shared<Request>();
  request->id = message.request->id;
  request->prompt = message.request->prompt;
  const std::vector<int32_t>& output = message.state.output;
  request->prompt.insert(request->prompt.end(), output.begin(), output.end());
  request->prompt.pop_back();
  request->sampling.temperature = 0;
  request->max_tokens = 2;
  request->ignore_eos = true;
  request->priority = message.request->priority;
  request->cache_salt = message.request->cache_salt;
  request->arrival_s = message.request->arrival_s;
  request->deadline_s = message.request->deadline_s;
  compute(kv_.attempts.begin(message.attempt, std::move(request), {}, true), true, message.decode);
}

void Instance::handle(InstanceId, PeerGone message) {
  peers_.disconnect(message.id);
  kv_.peer_gone(message.id);
  peers_.forget(message.id);
}

void Instance::renew_leases() {
  handover::SharedAttempts of_peer;
  if (!leases_.renew(of_peer)) return;
  for (auto& [peer, attempts] : of_peer) bus_.send_now(options_.id, peer, KvRenewed{std::move(attempts)});
  bus_.send_now(options_.id, kConductor, Report{std::make_shared<InstanceStats>(stats())});
}

void Instance::shut_down(FinishReason reason, const std::string& error) {
  const double now = parts_.clock.now();
  engine_.end_all(reason, error);
  kv_.clear(reason, error);
  for (Envelope& envelope : leases_.take()) {
    auto end = [&](AttemptId attempt, const auto& request, const ChoiceState& state) {
      emit_end(*kv_.attempts.begin(attempt, request, state), reason, error, now);
    };
    if (auto* start = std::get_if<StartRequest>(&envelope.message)) {
      end(start->attempt, start->request, start->state);
    } else if (auto* delivered = std::get_if<KvDelivered>(&envelope.message)) {
      kv_.receiver.handle(envelope.from, std::move(*delivered));
    }
  }
  leases_.inbox().clear();
  n_waiting_ = 0;
  kv_.receiver.clear(reason, error);
}

}  // namespace xpyd::disagg

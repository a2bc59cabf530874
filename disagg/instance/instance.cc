#include "disagg/instance/instance.h"

#include <algorithm>

#include "base/log.h"
#include "disagg/conductor/event_log.h"
#include "disagg/life.h"
#include "disagg/messages.h"

namespace xpyd::disagg {

Instance::Instance(InstanceOptions options, std::unique_ptr<Model> model, std::shared_ptr<KvMemory> memory,
                   std::unique_ptr<KvTransport> transport, Clock& clock, Post& post)
    : options_(std::move(options)),
      model_(std::move(model)),
      memory_(std::move(memory)),
      transport_(std::move(transport)),
      clock_(clock),
      post_(post),
      parts_{.self = options_.id,
             .memory = *memory_,
             .wire = *transport_,
             .clock = clock,
             .post = post_,
             .tokenizer = options_.engine.tokenizer,
             .n_layers = model_->config().n_layers,
             .post_by_stage = options_.post_by_stage ? std::optional(shards_of(*memory_)) : std::nullopt,
             .lease_s = options_.lease_s,
             .checksum = options_.checksum,
             .visits = options_.visits},
      attempts_(parts_),
      leases_(options_.lease_s, clock),
      sender_(parts_, leases_, options_.stream_kv),
      engine_(*model_, *memory_, options_.engine, clock, &sender_),
      receiver_(parts_, attempts_, engine_),
      reservations_(parts_, sender_, engine_, 2l * model_->stages() * options_.engine.step_tokens),
      fetcher_(parts_, attempts_, engine_.by_layer(),
               [this](StartRequest message, KvHandle kv, int tokens, std::shared_ptr<KvArrival> arrival) {
                 begin(std::move(message), kv, tokens, std::move(arrival));
               }),
      lender_(parts_) {
  if (options_.log) watch();
  // A load waits behind loads, and what is computed in its place behind what was: link and processor work beside each
  // other. (`until`: when that will be computed.)
  memory_->loads_if([this, until = 0.0](int from, int to, int tokens, double load_s) mutable {
    const auto prompt_s = [&](int cached) {
      return cost_.seconds(prompt_steps(tokens - cached, cached, options_.engine.step_tokens));
    };
    if (!computes_) return true;
    const double saved_s = prompt_s(from) - prompt_s(to), now = clock_.now();
    const double computed_s = std::max(0.0, until - now) + saved_s;
    if (load_s < computed_s || saved_s <= 0) return true;  // or nothing is known yet
    until = now + computed_s;
    return false;
  });
  published_.name = options_.name;
  cost_ = options_.cost;
  engine_.know_cost(cost_.terms(), options_.cost_known ? kGivenSteps : 0);
  publish();
}

void Instance::watch() {
  engine_.watch_plans([this](const BatchView& view, const BatchPlan& plan) {
    options_.log->decided(clock_.now(), "plan", options_.engine.policy->name, 0, view, NoOptions{}, plan, "instance",
                          options_.name, "admission", view.admission->name, "requests", engine_.planned_requests());
  });
  engine_.watch_chunks([this](const ChunkView& view, const ChunkState& before, const ChunkChoice& choice) {
    options_.log->decided(clock_.now(), "chunk", options_.engine.chunks.policy->name, 0, view, before, choice,
                          "instance", options_.name);
  });
  engine_.watch_loads([this](const Sequence& s) {
    options_.log->happened("fetch", FetchLife{.instance = options_.name,
                                              .request = s.request->id,
                                              .t = s.load_s,
                                              .seconds = clock_.now() - s.load_s,
                                              .tokens = s.computed});
  });
  fetcher_.ended = [this](const pool::Fetched& f) {
    options_.log->happened("fetch", FetchLife{.instance = options_.name,
                                              .request = f.request,
                                              .t = f.begin_s,
                                              .seconds = f.end_s - f.begin_s,
                                              .tokens = f.tokens,
                                              .from = name_of(f.from),
                                              .worth_s = f.worth_s,
                                              .bytes = double(f.bytes) * options_.bytes_scale});
  };
  parts_.moved = [this](const Moved& moved) {
    options_.log->happened("transfer", TransferLife{.from = name_of(moved.from),
                                                    .to = name_of(moved.to),
                                                    .request = moved.request,
                                                    .t = moved.begin_s,
                                                    .seconds = moved.end_s - moved.begin_s,
                                                    .tokens = moved.tokens,
                                                    .bytes = double(moved.bytes) * options_.bytes_scale});
  };
}

std::string Instance::name_of(InstanceId id) const {
  const auto known = peer_names_.find(id);
  return id == options_.id ? options_.name : known == peer_names_.end() ? "i" + std::to_string(id) : known->second;
}

InstanceInfo Instance::info() const {
  const KvStats kv = memory_->stats();
  return {.id = options_.id,
          .name = options_.name,
          .role = options_.role,
          .layout = memory_->layout(),
          .shards = shards_of(*memory_),
          .stages = engine_.in_waves() ? model_->stages() : 1,
          .capacity_blocks = kv.capacity + kv.elsewhere,
          .block_tokens = kv.block_tokens,
          .tier_blocks = int(std::min<int64_t>(1 << 30, kv.tiers.host_capacity + kv.tiers.disk_capacity)),
          .max_batch = options_.engine.max_batch,
          .address = transport_->address()};
}

void Instance::send(InstanceId from, Message message) {
  leases_.put({from, options_.id, std::move(message)});
  if (engine_.in_waves()) model_->interrupt();  // mail does not wait for a wave
}

bool Instance::turn() {
  bool moved = connect_wires();
  std::vector<Envelope>& inbox = leases_.take();
  std::vector<Envelope> waiting;
  for (size_t i = 0; i < inbox.size(); ++i) {
    Envelope& envelope = inbox[i];
    if (waits_for_wire(envelope)) {
      // Or the conductor's queue would stand still for other decode instances as well.
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
  moved |= sender_.tick();
  moved |= receiver_.tick();
  moved |= fetcher_.tick();
  moved |= lender_.tick();
  moved |= reservations_.tick();
  update_leases();
  charge_transfers();
  if (!engine_.in_waves()) post_.hold();  // a step of waves may wait for others when it has told of the first tokens
  moved |= engine_.step();
  fit_cost();
  report_cache();
  publish();
  // Nobody hears of an idle instance that it still holds what its last answer needed.
  const bool was_idle = std::exchange(idle_, idle());
  const bool tell_counters = options_.lease_s > 0 && (post_.has_answers() || (idle_ && !was_idle));
  post_.release(options_.id, tell_counters ? std::optional<Message>(Report{stats()}) : std::nullopt);
  draw_map();
  return moved;
}

void Instance::run(const std::atomic<bool>& stop) {
  while (!stop.load(std::memory_order_relaxed)) {
    back_to_back_ = turn();
    if (back_to_back_) continue;
    double nap = idle() ? 0.1 : counts_posts() ? 0.0001 : 0.0005;
    if (options_.lease_s > 0) nap = std::min(nap, options_.lease_s / 8);
    for (const auto& [id, meeting] : pending_) nap = std::min(nap, std::max(0.001, meeting.again_s - clock_.now()));
    leases_.mail().wait(nap);
  }
}

void Instance::handle(InstanceId, StartRequest message) {
  const AttemptId attempt = message.attempt;
  // It comes from another process.
  if (sender_.has(attempt) || receiver_.has(attempt) || fetcher_.has(attempt)) return;
  if (message.order == DisaggOrder::decode_first) return receiver_.start(std::move(message));
  if (!message.fetch.holders.empty()) return fetcher_.start(std::move(message));
  begin(std::move(message), kNoKv, 0, nullptr);
}

// Its first `tokens` tokens are in `kv`, if that is any, or come there.
void Instance::begin(StartRequest message, KvHandle kv, int tokens, std::shared_ptr<KvArrival> arrival) {
  SequencePtr sequence = attempts_.begin(message.attempt, std::move(message.request), message.state);
  if (kv != kNoKv) {
    sequence->kv = kv;
    sequence->computed = tokens;
    sequence->early = sequence->probed = true;
    sequence->arrival = std::move(arrival);
  }
  compute(std::move(sequence), message.order, message.decode);
}

void Instance::compute(SequencePtr sequence, DisaggOrder order, InstanceId decode) {
  const AttemptId attempt = sequence->attempt;
  sequence->queue_ticket = attempts_.ticket(attempt, AttemptProgress::started);
  sequence->prompt_ticket = attempts_.ticket(attempt, AttemptProgress::prompt_done);
  sequence->leaves = order != DisaggOrder::local;
  if (sequence->leaves) sender_.expect(attempt, order, decode);
  if (sequence->leaves && options_.escrow) return reservations_.start(std::move(sequence), order, decode);
  engine_.submit(std::move(sequence));
}

// All but the prompt's last token, whose logits the decode instance wants: one that is sampled here is nobody's.
void Instance::handle(InstanceId, PrefillJob message) {
  if (sender_.has(message.attempt) || receiver_.has(message.attempt)) return;
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
  request->session_id = message.request->session_id;
  request->arrival_s = message.request->arrival_s;
  request->deadline_s = message.request->deadline_s;
  compute(attempts_.begin(message.attempt, std::move(request), {}, true), DisaggOrder::decode_first, message.decode);
}

void Instance::handle(InstanceId, PeerJoined message) {
  if (message.info.id == options_.id) return;
  const InstanceId id = message.info.id;
  peer_names_[id] = message.info.name;
  pending_[id] = {.info = std::move(message.info), .since_s = clock_.now()};
}

// Goes on connecting, without waiting for anybody. What a peer says and what is placed on it waits
// for the first call alone: a turn looks at all of it with the same eyes, so nothing is overtaken.
bool Instance::connect_wires() {
  constexpr double kAgainSeconds = 0.25;
  const double now = clock_.now();
  bool moved = false;
  for (auto at = pending_.begin(); at != pending_.end();) {
    PendingPeer& peer = at->second;
    const InstanceInfo& info = peer.info;
    const auto next = std::next(at);
    if (now >= peer.again_s) {
      const Result<bool> connected = transport_->connect(info.id, info.address);
      if (!connected) {  // until it can, what is placed on the two of us is placed anew
        if (std::exchange(peer.calling, false))
          log_line(LogLevel::warning, "xpyd: %s cannot reach %s: %s", options_.name.c_str(), info.name.c_str(),
                   connected.error().message.c_str());
        peer.again_s = now + std::max(kAgainSeconds, now - peer.since_s);
        peer.since_s = peer.again_s;
        moved = true;
      } else if (connected.value()) {
        if (Status known = parts_.peers.add(info.id, info.layout, info.shards);
            !known)  // it comes from another process
          log_line(LogLevel::warning, "xpyd: %s and %s cannot exchange KV: %s", options_.name.c_str(),
                   info.name.c_str(), known.error().message.c_str());
        pending_.erase(at);
        moved = true;
      }
    }
    at = next;
  }
  return moved;
}

// What a peer that is being called for the first time says, and what is placed on it, is of use when it can be reached,
// and is given up when it cannot. A client that has left or has no more time does not wait for that.
bool Instance::waits_for_wire(const Envelope& envelope) const {
  InstanceId peer = envelope.from;
  const auto placed = [&](const auto* work) {
    if (!work) return;
    const double until = work->request->deadline_s;
    const bool over = attempts_.aborted(work->attempt) || (until > 0 && clock_.now() > until);
    peer = over ? kConductor : work->decode;
  };
  placed(std::get_if<StartRequest>(&envelope.message));
  placed(std::get_if<PrefillJob>(&envelope.message));
  const auto found = pending_.find(peer);
  return found != pending_.end() && found->second.calling;
}

void Instance::handle(InstanceId, PeerGone message) {
  transport_->disconnect(message.id);
  pending_.erase(message.id);
  sender_.peer_gone(message.id);
  receiver_.peer_gone(message.id);
  fetcher_.peer_gone(message.id);
  lender_.peer_gone(message.id);
  peer_names_.erase(message.id);
  parts_.peers.erase(message.id);
}

// The peer may live, and write: windows that are being closed wait for it. Its wire may have
// broken, too: when it joins again it is connected again.
void Instance::handle(InstanceId, PeerBroken message) {
  const std::string why = options_.name + " lost its connection to a peer";
  sender_.peer_gone(message.id, why);
  receiver_.peer_gone(message.id, why);
  fetcher_.peer_gone(message.id);
  lender_.peer_gone(message.id);
  parts_.peers.erase(message.id);
}

// Between the same two instances an attempt goes one way only.
void Instance::handle(InstanceId from, ReservationCancelled message) {
  sender_.handle(from, message);
  receiver_.handle(from, message);
}

void Instance::handle(InstanceId from, KvRenewed message) {
  for (AttemptId attempt : message.attempts) {
    sender_.renewed(from, attempt);
    receiver_.renewed(from, attempt);
    lender_.renewed(from, attempt);
  }
}

// What is true now, and will be while a step takes its time.
void Instance::update_leases() {
  if (options_.lease_s == 0) return;
  handover::SharedAttempts of_peer;
  sender_.add_shared(of_peer);
  receiver_.add_shared(of_peer);
  fetcher_.add_shared(of_peer);
  leases_.update(std::move(of_peer));
}

void Instance::renew_leases() {
  handover::SharedAttempts of_peer;
  if (!leases_.renew(of_peer)) return;
  for (auto& [peer, attempts] : of_peer) post_.send_now(options_.id, peer, KvRenewed{std::move(attempts)});
  post_.send_now(options_.id, kConductor, Report{stats()});
}

void Instance::report_cache() {
  constexpr size_t kMost = 4096;  // hashes in one report
  const double now = clock_.now();
  if (!options_.cache_log || now < reported_s_ + options_.report_every_s) return;
  reported_s_ = now;
  const auto piece = [](const std::vector<uint64_t>& of, size_t at) {
    return std::vector<uint64_t>(of.begin() + long(std::min(at, of.size())),
                                 of.begin() + long(std::min(at + kMost / 2, of.size())));
  };
  for (const Tier tier : {Tier::device, Tier::host, Tier::disk}) {
    const PrefixChanges changes = options_.cache_log->take(tier);
    for (size_t at = 0; at < std::max(changes.stored.size(), changes.removed.size()); at += kMost / 2)
      parts_.tell(kConductor, CacheReport{tier, piece(changes.stored, at), piece(changes.removed, at)});
  }
}

void Instance::shut_down(FinishReason reason, const std::string& error) {
  const double now = clock_.now();
  engine_.end_all(reason, error);
  reservations_.clear(reason, error);
  fetcher_.clear(reason, error, attempts_);
  lender_.clear();
  sender_.clear(reason, error);
  receiver_.clear(reason, error);
  for (Envelope& envelope : leases_.take()) {
    auto end = [&](AttemptId attempt, const auto& request, const ChoiceState& state) {
      emit_end(*attempts_.begin(attempt, request, state), reason, error, now);
    };
    if (auto* start = std::get_if<StartRequest>(&envelope.message)) {
      end(start->attempt, start->request, start->state);
    } else if (auto* delivered = std::get_if<KvDelivered>(&envelope.message)) {
      receiver_.handle(envelope.from, std::move(*delivered));
    }
  }
  leases_.inbox().clear();
  n_waiting_ = 0;
  receiver_.clear(reason, error);
}

// What a step took, against what it was said to take. Of two steps in a row the second takes what lies between their
// ends: mail, tokens and wires are looked after in that time, too. Of waves it is their slowest stage's time, which is
// the time from one to the next where stages are busy.
void Instance::fit_cost() {
  const EngineStats& engine = engine_.stats();
  if (engine.steps == counted_.steps) {
    fitted_s_ = 0;
    return;
  }
  StepShape step = engine.work;
  step.add(counted_.work, -1);
  const double now = clock_.now();
  const bool from_the_last = back_to_back_ && fitted_s_ > 0 && !engine_.in_waves();
  const double seconds = from_the_last ? now - fitted_s_ : engine.step_seconds - counted_.step_seconds;
  fitted_s_ = now;
  {
    std::lock_guard lock(stats_mutex_);
    published_.cost_error.add(cost_.seconds(step), seconds);
  }
  // The first steps of all are slow: memory is touched, and kernels are loaded, for the first time.
  if (!options_.cost_known && counted_.steps > 0) {
    cost_.saw(step, seconds);
    engine_.know_cost(cost_.terms(), cost_.steps_seen());
  }
  if (options_.log) log_step(step, seconds);
  counted_ = engine;
}

void Instance::log_step(const StepShape& step, double seconds) {
  const KvStats kv = memory_->stats();
  options_.log->happened("step", StepLife{.instance = options_.name,
                                          .t = fitted_s_ - seconds,
                                          .seconds = seconds,
                                          .steps = int(step.steps),
                                          .tokens = int(step.tokens),
                                          .prefix = step.prefix,
                                          .attended = step.attended,
                                          .decodes = int(step.decodes / step.steps),
                                          .context = int64_t(step.decode_context / step.steps),
                                          .running = engine_.running(),
                                          .waiting = engine_.waiting(),
                                          .free = kv.free,
                                          .active = kv.active,
                                          .cached = kv.cached,
                                          .in_transfer = kv.in_transfer,
                                          .evicted = int(kv.evictions - std::exchange(logged_evictions_, kv.evictions)),
                                          .wire_s_per_byte = parts_.rate.s_per_byte()});
}

// What others than the engine hold now they have until the next turn: what a step changes is at its end.
void Instance::charge_transfers() {
  const double now = clock_.now();
  transfer_block_s_ += double(moving_blocks_) * (now - std::exchange(charged_s_, now));
  moving_blocks_ = 0;
  const auto add = [this](uint64_t, KvHandle handle) { moving_blocks_ += memory_->blocks(handle).size(); };
  reservations_.each_holder(add), sender_.each_holder(add), receiver_.each_holder(add);
  fetcher_.each_holder(add), lender_.each_holder(add);
}

void Instance::publish() {
  const KvStats kv = memory_->stats();
  const EngineStats& engine = engine_.stats();
  std::lock_guard lock(stats_mutex_);
  InstanceStats& s = published_;
  s.running = engine_.running();
  s.waiting = engine_.waiting() + reservations_.size();
  s.queue_remote_prefilling = receiver_.expected();
  s.queue_prefill_sending = sender_.sending();
  s.kv = kv;
  s.steps = engine.steps;
  s.prompt_tokens = engine.prompt_tokens;
  s.generated_tokens = engine.generated_tokens;
  s.preemptions = engine.preemptions;
  s.draft_tokens = engine.draft_tokens;
  s.accepted_tokens = engine.accepted_tokens;
  s.chunk_decisions = engine.chunk_decisions;
  s.chunk_extrapolations = engine.chunk_extrapolations;
  s.step_seconds = engine.step_seconds;
  s.wait_seconds = engine.wait_seconds;
  s.schedule_seconds = engine.schedule_seconds;
  const handover::ReceiverStats& received = receiver_.stats();
  s.transfers = parts_.posted.transfers;
  s.transfer_bytes = parts_.posted.bytes;
  s.transfer_descriptors = parts_.posted.descriptors;
  s.transfer_seconds = parts_.posted.seconds;
  s.wire_s_per_byte = parts_.rate.s_per_byte();
  s.kv_refused = received.refused_kv;
  s.leases_expired = received.expired;
  s.fetch = parts_.fetch;
  const double block_gb = 1e-9 * options_.bytes_scale * kv.block_tokens * double(memory_->layout().shape.token_bytes());
  s.spent = {.prefill_gb_s = block_gb * engine.prompt_block_s,
             .decode_gb_s = block_gb * engine.decode_block_s,
             .transfer_gb_s = block_gb * transfer_block_s_,
             .tflop = 1e-12 * engine.flops,
             .peak_tflops = options_.peak_tflops};
  s.heartbeat_s = clock_.now();
  s.cost = cost_.terms();
  published_count_.fetch_add(1, std::memory_order_release);
}

InstanceStats Instance::stats() const {
  std::lock_guard lock(stats_mutex_);
  return published_;
}

std::shared_ptr<const BlockMap> Instance::block_map() const {
  watched_until_s_.store(clock_.now() + 5, std::memory_order_relaxed);
  std::lock_guard lock(stats_mutex_);
  return map_;
}

void Instance::draw_map() {
  double until = watched_until_s_.load(std::memory_order_relaxed);
  if (until == 0) return;
  const double began = clock_.now();
  std::shared_ptr<BlockMap> map;  // none, when nobody looks any more
  if (began <= until) {
    if (began < next_map_s_) return;
    std::vector<std::pair<int32_t, uint64_t>> held;
    const auto add = [&](uint64_t request, KvHandle handle) {
      for (int32_t block : memory_->blocks(handle)) held.emplace_back(block, request);
    };
    engine_.each_holder(add), reservations_.each_holder(add), sender_.each_holder(add), receiver_.each_holder(add);
    fetcher_.each_holder(add), lender_.each_holder(add);
    map = std::make_shared<BlockMap>(map_blocks(memory_->states(), std::move(held)));
    map->t = began;
    next_map_s_ = began + std::max(0.1, 50 * (clock_.now() - began));
  } else if (!watched_until_s_.compare_exchange_strong(until, 0)) {
    return;  // somebody has come just now
  }
  std::lock_guard lock(stats_mutex_);
  map_ = std::move(map);
}

}  // namespace xpyd::disagg

#include "disagg/instance.h"

#include <algorithm>

namespace xpyd {

Instance::Instance(InstanceOptions options, std::unique_ptr<Model> model, std::unique_ptr<KvMemory> memory,
                   std::unique_ptr<KvTransport> transport, Clock& clock)
    : options_(std::move(options)),
      model_(std::move(model)),
      memory_(std::move(memory)),
      transport_(std::move(transport)),
      clock_(clock),
      engine_(*model_, *memory_, options_.engine, clock, this) {
  published_.name = options_.name;
  publish();
}

void Instance::connect(std::vector<Instance*> peers, int self) {
  peers_ = std::move(peers);
  self_ = self;
}

bool Instance::turn() {
  mailbox_.take(inbox_);
  bool moved = !inbox_.empty();
  for (Message& message : inbox_) {
    std::visit([this](auto& m) { handle(std::move(m)); }, message);
  }
  inbox_.clear();
  moved |= poll_transfers();
  moved |= try_reserve();
  moved |= engine_.step();
  publish();
  return moved;
}

void Instance::run(const std::atomic<bool>& stop) {
  while (!stop.load(std::memory_order_relaxed)) {
    if (turn()) continue;
    bool empty = engine_.idle() && outgoing_.empty() && remote_prefilling_.empty();
    mailbox_.wait(empty ? 0.1 : 0.0005);
  }
}

// ---- The prefill side ------------------------------------------------------------------------------------

void Instance::handle(StartRequest message) { engine_.submit(std::move(message.sequence)); }

// P itself asks for room, so that both directions are in order: D hears of a request before it hears of its
// end, and P knows it before D answers. It asks when the prompt starts, so that D grants room in the order in
// which P can use it.
void Instance::prefill_started(const Sequence& sequence) {
  Outgoing& out = outgoing_[sequence.request->id];
  out.decode_instance = sequence.decode_instance;
  out.sent.assign(size_t(model_->config().n_layers), 0);
  peers_[size_t(out.decode_instance)]->send(ReserveKv{sequence.request, self_});
}

// D's answer comes while the first step runs; the layers that are left need not wait for the step's end.
void Instance::receive_reservations() {
  size_t known = inbox_.size();
  mailbox_.take(inbox_);
  for (size_t i = known; i < inbox_.size(); ++i) {
    if (auto* reserved = std::get_if<KvReserved>(&inbox_[i])) handle(std::move(*reserved));
  }
  std::erase_if(inbox_, [](const Message& m) { return std::holds_alternative<KvReserved>(m); });
}

void Instance::handle(KvReserved message) {
  auto found = outgoing_.find(message.request_id);
  if (found == outgoing_.end()) return;  // cancelled meanwhile, and the other side has been told
  Outgoing& out = found->second;
  out.destination = std::move(message.destination);
  std::fill(out.sent.begin(), out.sent.end(), out.destination->cached_tokens);
  if (!out.choices.empty())
    send_kv(out, out.kv, 0, model_->config().n_layers, out.choices[0]->n_prompt());
}

// What was computed before the destination was known goes with the first call after it is.
void Instance::kv_written(Sequence& sequence, int layer_begin, int layer_end, int, int token_end) {
  if (options_.stream_kv == StreamKv::request) return;
  Outgoing& out = outgoing_.at(sequence.request->id);
  if (!out.destination) receive_reservations();
  if (out.destination) send_kv(out, sequence.kv, layer_begin, layer_end, token_end);
}

void Instance::send_kv(Outgoing& out, KvHandle kv, int layer_begin, int layer_end, int token_end) {
  if (transport_->zero_copy()) return;
  double start = clock_.now();
  KvView source = memory_->view(kv), destination = out.destination->view();
  for (int layer = layer_begin; layer < layer_end;) {
    int token_begin = out.sent[size_t(layer)], end = layer + 1;
    while (end < layer_end && out.sent[size_t(end)] == token_begin) ++end;
    if (token_begin < token_end) {
      plan_transfer(source, destination, {token_begin, token_end, layer, end}, plan_);
      transfer_bytes_ += int64_t(plan_.bytes);
      transfer_descriptors_ += int64_t(plan_.copies.size());
      TransferId id = transport_->post(plan_);
      TransferState state = transport_->poll(id);
      if (state == TransferState::in_flight) out.in_flight.push_back({id, memory_->pin(kv)});
      if (state == TransferState::failed) out.failed = true;
      std::fill(out.sent.begin() + layer, out.sent.begin() + end, token_end);
    }
    layer = end;
  }
  transfer_seconds_ += clock_.now() - start;
}

void Instance::prefill_done(std::vector<SequencePtr> choices) {
  Outgoing& out = outgoing_.at(choices[0]->request->id);
  out.kv = std::exchange(choices[0]->kv, kNoKv);
  out.choices = std::move(choices);
  if (out.destination)
    send_kv(out, out.kv, 0, model_->config().n_layers, out.choices[0]->n_prompt());
}

void Instance::prefill_cancelled(const Sequence& sequence) {
  auto found = outgoing_.find(sequence.request->id);
  if (found != outgoing_.end()) found->second.cancelled = true;  // else it had not started
}

bool Instance::poll_transfers() {
  bool moved = false;
  for (auto i = outgoing_.begin(); i != outgoing_.end();) {
    moved |= std::erase_if(i->second.in_flight, [&](const Outgoing::Flight& flight) {
               TransferState state = transport_->poll(flight.id);
               if (state == TransferState::in_flight) return false;
               if (state == TransferState::failed) i->second.failed = true;
               memory_->unpin(flight.lease);
               return true;
             }) > 0;
    bool done = try_deliver(i->first, i->second);
    moved |= done;
    i = done ? outgoing_.erase(i) : std::next(i);
  }
  return moved;
}

// Hands over, or gives back the reservation, once no byte is in flight. True: `out` is finished.
bool Instance::try_deliver(uint64_t request_id, Outgoing& out) {
  if (!out.in_flight.empty()) return false;
  Instance& decode = *peers_[size_t(out.decode_instance)];
  // Who has gone away, or is late, need not wait for room on the other side.
  if (!out.choices.empty()) {
    const Sequence& first = *out.choices[0];
    bool gone = first.cancelled && first.cancelled->load();
    bool late = first.request->deadline_s > 0 && clock_.now() > first.request->deadline_s;
    if (gone || late) {
      memory_->free(out.kv);
      for (const SequencePtr& choice : out.choices)
        emit_end(*choice, gone ? FinishReason::abort : FinishReason::timeout, "", clock_.now());
      out.cancelled = true;
    }
  }
  if (out.cancelled) {
    decode.send(ReservationCancelled{request_id});
    return true;
  }
  if (out.choices.empty() || !out.destination) return false;
  KvDelivered delivered{request_id, std::move(out.choices), !out.failed, std::nullopt};
  if (transport_->zero_copy()) {
    delivered.handover = memory_->hand_over(out.kv);
  } else {
    memory_->free(out.kv);
  }
  ++transfers_;
  decode.send(std::move(delivered));
  return true;
}

// ---- The decode side -------------------------------------------------------------------------------------

void Instance::handle(ReserveKv message) { remote_prefilling_.push_back(std::move(message)); }

bool Instance::try_reserve() {
  bool moved = false;
  while (!remote_prefilling_.empty() && reserve_one(remote_prefilling_.front())) {
    remote_prefilling_.pop_front();
    moved = true;
  }
  return moved;
}

// Promises only what fits now: a place in the batch for every choice and, where bytes are to be copied, the
// blocks of the whole prompt. Preempted sequences take no place: they wait for memory, and with a shared pool
// that memory may be what the prompts to be handed over hold.
bool Instance::reserve_one(const ReserveKv& wanted) {
  const Request& request = *wanted.request;
  int sequences = engine_.running() + engine_.waiting_with_kv() + reserved_choices_;
  if (sequences > 0 && sequences + request.n > options_.engine.max_batch) return false;
  Reservation reservation;
  reservation.choices = request.n;
  KvDestination destination;
  if (!transport_->zero_copy()) {
    KvStats kv = memory_->stats();
    int prompt = int(request.prompt.size());
    int spare = sequences == 0 ? 0 : kv.capacity / 100;
    int need = (prompt + kv.block_tokens - 1) / kv.block_tokens -
               memory_->probe(request.prompt, request.cache_salt) / kv.block_tokens;
    if (need + spare > kv.available()) return false;
    // What a tier of this instance has the other one has computed or loaded: it comes from there.
    Result<KvReservation> reserved = memory_->reserve_here(request.prompt, request.cache_salt);
    if (!reserved) return false;
    reservation.kv = reserved.value().handle;
    reservation.cached_tokens = reserved.value().cached_tokens;
    if (!memory_->append(reservation.kv, prompt - reservation.cached_tokens)) {
      memory_->free(reservation.kv);
      return false;
    }
    reservation.lease = memory_->pin(reservation.kv);
    KvView view = memory_->view(reservation.kv);
    auto blocks = memory_->blocks(reservation.kv);
    destination = {view.pool, view.layout, {}, view.slot, reservation.cached_tokens};
    if (!view.contiguous()) destination.blocks.assign(blocks.begin(), blocks.end());
  }
  reserved_choices_ += reservation.choices;
  reservations_.emplace(request.id, reservation);
  peers_[size_t(wanted.prefill_instance)]->send(KvReserved{request.id, std::move(destination)});
  return true;
}

void Instance::handle(KvDelivered message) {
  auto found = reservations_.find(message.request_id);
  XPYD_CHECK(found != reservations_.end(), "KV was delivered that nobody reserved room for");
  Reservation reservation = found->second;
  reservations_.erase(found);
  reserved_choices_ -= reservation.choices;

  std::span<const int32_t> prompt = message.choices[0]->request->prompt;
  uint64_t salt = message.choices[0]->request->cache_salt;
  KvHandle kv = reservation.kv;
  if (message.handover) {
    kv = memory_->adopt(std::move(*message.handover), prompt, salt);
  } else {
    memory_->unpin(reservation.lease);
    if (message.kv_arrived) {
      memory_->written(kv, prompt.subspan(size_t(reservation.cached_tokens)));
    } else {
      memory_->free(std::exchange(kv, kNoKv));
    }
  }
  bool first = true;
  for (SequencePtr& choice : message.choices) {
    choice->leaves = false;
    if (kv != kNoKv) {
      Result<KvHandle> own = first ? Result<KvHandle>(kv) : memory_->fork(kv);
      if (own) choice->kv = own.value();
    }
    choice->computed = choice->kv == kNoKv ? 0 : int(prompt.size());  // without KV: recompute
    first = false;
  }
  for (SequencePtr& choice : message.choices) {
    if (choice->kv == kNoKv) {
      engine_.submit(std::move(choice));
    } else {
      engine_.adopt(std::move(choice));
    }
  }
}

void Instance::handle(ReservationCancelled message) {
  auto found = reservations_.find(message.request_id);
  if (found == reservations_.end()) {
    std::erase_if(remote_prefilling_,
                  [&](const ReserveKv& r) { return r.request->id == message.request_id; });
    return;
  }
  if (found->second.kv != kNoKv) {
    memory_->unpin(found->second.lease);
    memory_->free(found->second.kv);
  }
  reserved_choices_ -= found->second.choices;
  reservations_.erase(found);
}

// ---- Both ------------------------------------------------------------------------------------------------

void Instance::shut_down(FinishReason reason, const std::string& error) {
  double now = clock_.now();
  auto end_all = [&](std::vector<SequencePtr>& choices) {
    for (SequencePtr& choice : choices) emit_end(*choice, reason, error, now);
    choices.clear();
  };
  engine_.end_all(reason, error);
  for (auto& [id, out] : outgoing_) end_all(out.choices);
  mailbox_.take(inbox_);
  for (Message& message : inbox_) {
    if (auto* start = std::get_if<StartRequest>(&message)) {
      emit_end(*start->sequence, reason, error, now);
    } else if (auto* delivered = std::get_if<KvDelivered>(&message)) {
      end_all(delivered->choices);
      if (delivered->handover) memory_->discard(std::move(*delivered->handover));
    }
  }
  inbox_.clear();
}

void Instance::publish() {
  KvStats kv = memory_->stats();
  const EngineStats& engine = engine_.stats();
  std::lock_guard lock(stats_mutex_);
  InstanceStats& s = published_;
  s.running = engine_.running();
  s.waiting = engine_.waiting();
  s.queue_remote_prefilling = int(remote_prefilling_.size() + reservations_.size());
  s.queue_prefill_sending = 0;
  for (const auto& [id, out] : outgoing_) s.queue_prefill_sending += out.choices.empty() ? 0 : 1;
  s.kv = kv;
  s.steps = engine.steps;
  s.prompt_tokens = engine.prompt_tokens;
  s.generated_tokens = engine.generated_tokens;
  s.preemptions = engine.preemptions;
  s.step_seconds = engine.step_seconds;
  s.wait_seconds = engine.wait_seconds;
  s.schedule_seconds = engine.schedule_seconds;
  s.transfers = transfers_;
  s.transfer_bytes = transfer_bytes_;
  s.transfer_descriptors = transfer_descriptors_;
  s.transfer_seconds = transfer_seconds_;
  s.heartbeat_s = clock_.now();
}

InstanceStats Instance::stats() const {
  std::lock_guard lock(stats_mutex_);
  return published_;
}

}  // namespace xpyd

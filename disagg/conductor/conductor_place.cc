// Conductor: where a request's choices go, and the global prefill queue.
#include <algorithm>
#include <utility>

#include "disagg/conductor/conductor.h"
#include "disagg/conductor/event_log.h"
#include "disagg/messages.h"

namespace xpyd::disagg {
namespace {

// Prompt and output; `both` is where they are joined if need be.
std::span<const int32_t> tokens_of(const Request& request, const std::vector<int32_t>& output,
                                   std::vector<int32_t>& both) {
  if (output.empty()) return request.prompt;
  both = request.prompt;
  both.insert(both.end(), output.begin(), output.end());
  return both;
}

}  // namespace

// What a token of this prompt costs on either side, and a step of D; what has not been measured is the
// prior's: an instance that nobody has used yet is not free, and not out of reach.
void Conductor::add_costs(DisaggView& view, const InstanceStats& prefill, const InstanceStats& decode,
                          const KvShape& shape) const {
  const std::optional<CostPrior>& prior = options_.prior;
  const bool pull = options_.disagg_options.pull;
  const auto per_token = [&](const InstanceStats& where, int cached) {
    const PlacedPrompt prompt = board_.prompt(view.tokens, std::min(cached, view.tokens - 1));
    return board_.cost(where).seconds(prompt.work) / double(prompt.tokens);
  };
  view.prefill_s_per_token = per_token(prefill, view.cached_prefill);
  view.decode_s_per_token = per_token(decode, view.cached_decode);
  const int sequences = std::max(1, view.decode_sequences);
  StepShape step;
  step.add_decodes(sequences, double(sequences) * view.tokens);
  view.step_s = board_.cost(decode).seconds(step);
  view.kv_s_per_token = (pull ? decode : prefill).wire_s_per_byte * double(shape.token_bytes());
  if (prior && view.kv_s_per_token == 0 && !options_.zero_copy)  // a copy on this machine: no wire is faster
    view.kv_s_per_token = 2 * double(shape.token_bytes()) / prior->rates.bytes_per_s;
  view.chunk_tokens = options_.step_tokens;
  view.overlap = overlap(options_.stream_kv, pull, shape.n_layers, view.tokens - view.cached_prefill,
                         options_.step_tokens);
}

void Conductor::charge(Attempt& attempt, Member& member) {
  attempt.prefill = member.info.id;
  attempt.queued = attempt.prompting = true;
  requests_.at(attempt.request).life.prefill = member.info.name;
  board_.placed(member, attempt.prompt, clock_.now());
}

// Places choices [first, first + count) of a request. False: there is nobody to place them on.
bool Conductor::start(uint64_t id, int first, int count, Out& out) {
  Entry& entry = requests_.at(id);
  const Request& request = *entry.request;
  Choice& choice = entry.choices[size_t(first)];
  std::vector<int32_t> both;
  const std::span<const int32_t> tokens = tokens_of(request, choice.output, both);
  PromptHashes prompt(tokens, request.cache_salt);
  ClusterView seen = board_.look(prompt, clock_.now());
  seen.number = uint64_t(totals_.attempts);
  seen.random = random_.next();
  seen.objectives = objectives(request);
  Placement placed = options_.placement->place(seen, options_.placement_options);
  if (placed.prefill < 0 || placed.decode < 0) return false;
  EventLog* const log = options_.log.get();
  if (log) log->decided(clock_.now(), "place", options_.placement->name, id, seen, options_.placement_options, placed);
  // Of whom one token is wanted, that is the one that comes with the prompt: nobody needs the KV.
  if (int(choice.output.size()) + 1 >= request.max_tokens) placed.decode = placed.prefill;
  totals_.regret += regret_ratio(seen, placed.prefill);
  const InstanceView& p = seen.instances[size_t(placed.prefill)];
  Member& prefill = members_.at(board_.ids()[size_t(placed.prefill)]);
  const auto order_at = [&](int at) {
    const InstanceView& d = seen.instances[size_t(at)];
    const Member& decode = members_.at(board_.ids()[size_t(at)]);
    DisaggView view{.tokens = int(tokens.size()),
                    .cached_decode = d.held_tokens(),
                    .cached_prefill = p.held_tokens(),
                    .prefill_jobs = int(jobs_.size()),
                    .prefill_queued_tokens = p.queued_tokens,
                    .decode_queued_tokens = d.queued_tokens,
                    .decode_sequences = d.sequences,
                    .decode_life_s = decode.decodes.mean()};
    add_costs(view, prefill.probe->stats(), decode.probe->stats(), prefill.info.layout.shape);
    const DisaggOrder order = options_.disagg->decide(view, options_.disagg_options);
    if (log)
      log->decided(clock_.now(), "order", options_.disagg->name, id, view, options_.disagg_options, order, "instance",
                   decode.info.name);
    return order;
  };
  DisaggOrder order = DisaggOrder::push;
  bool ordered = false;  // the order is known already (one optional for both makes g++ 12 warn)
  if (options_.disagg->appends_at && placed.decode != placed.prefill) {
    const int at = options_.disagg->appends_at(seen);
    if (log) log->decided(clock_.now(), "append", options_.disagg->name, id, seen, NoOptions{}, at);
    if (at >= 0) order = order_at(at);
    if (at >= 0 && order == DisaggOrder::local) placed.decode = at;
    ordered = at >= 0 && placed.decode == at;
  }
  const InstanceView& d = seen.instances[size_t(placed.decode)];

  Attempt attempt{.request = id, .first = first, .count = count, .left = count};
  attempt.decode = board_.ids()[size_t(placed.decode)];
  attempt.prefill = prefill.info.id;
  Member& decode = members_.at(attempt.decode);
  Scoreboard::Fetch fetch;
  if (!options_.zero_copy && entry.tries == 0 && (options_.fetch->fetches || placed.source >= 0))
    fetch = board_.fetch(prefill, prompt);
  bool fetches = placed.source >= 0 && !fetch.holders.empty();
  if (!fetch.holders.empty() && options_.fetch->fetches) {
    const bool answer = options_.fetch->fetches(fetch.view);
    fetches |= answer;
    if (log)
      log->decided(clock_.now(), "fetch_or_compute", options_.fetch->name, id, fetch.view, NoOptions{}, answer,
                   "instance", prefill.info.name);
  }
  ReplicationView heat{.replicas = fetch.replicas};
  if (options_.replication->by_heat && entry.tries == 0) {
    const auto blocks = prompt.of(seen.block_tokens);
    const auto read = size_t(std::max(p.held_tokens(), fetch.view.holder_tokens) / seen.block_tokens);
    if (!heat_) heat_.emplace();
    heat_->read(blocks.first(std::min(read, blocks.size())), clock_.now());
    if (const auto first_fetched = size_t(fetch.view.cached_tokens / seen.block_tokens); first_fetched < blocks.size())
      heat.reads_s = heat_->reads_s(blocks[first_fetched], clock_.now());
  }
  const double fetch_s = placed.source >= 0 ? p.fetch_s : fetch_seconds(fetch.view);
  const double prompt_s = fetches ? p.prefill_s - fetch.view.saved_s : p.prefill_s;
  const double ttft_s = p.queue_s + (fetches ? fetch_s : 0) + prompt_s;
  if (entry.tries == 0 && options_.admission->arrives) {
    const int held = fetches ? fetch.view.holder_tokens : p.held_tokens();
    ClusterAdmission asked = admission(entry, attempt.decode, 0);
    asked.ttft_s = board_.ttft_s(prefill, int(tokens.size()), held, p.queue_s + prompt_s, asked.now_s);
    if (fetches) asked.ttft_s += fetch_s;
    asked.queue_s = p.queue_s;
    asked.idle = prefill.load.prompting.steps == 0 && jobs_.empty();
    asked.instances = seen.instances;
    const Refusal refusal = options_.admission->arrives(asked, options_.admission_options);
    if (log)
      log->decided(clock_.now(), "admit", options_.admission->name, id, asked, options_.admission_options, refusal,
                   "cost", decode_cost_.terms());
    if (refusal) {
      refuse(entry, refusal, totals_.refused_early, out);
      return true;
    }
  }
  // Where the prompt is computed.
  int cached = fetches ? fetch.view.holder_tokens : p.held_tokens();
  if (placed.prefill != placed.decode) {
    attempt.order = ordered ? order : order_at(placed.decode);
    if (attempt.order == DisaggOrder::pull && options_.zero_copy) attempt.order = DisaggOrder::push;
    // There P says nothing of the logits that it sees. (Not pushed: a P that waits for D's room, which waits for P's.)
    if (attempt.order == DisaggOrder::decode_first && request.prompt_logprobs >= 0) attempt.order = DisaggOrder::local;
    if (attempt.order == DisaggOrder::local) cached = d.held_tokens();
    if (attempt.order == DisaggOrder::local || attempt.order == DisaggOrder::decode_first) fetches = false;
  }
  const AttemptId number = ++last_attempt_;
  ++totals_.attempts;
  attempt.prompt = board_.prompt(int(tokens.size()), cached);
  attempt.context = int64_t(tokens.size());
  attempt.prompt_s = prompt_s;
  attempt.joins_s = clock_.now() + ttft_s;
  if (attempt.order == DisaggOrder::local) attempt.prefill = attempt.decode;
  if (mark(entry, &RequestLife::placed)) {
    RequestLife& life = entry.life;
    life.started = life.prompt_done = life.granted = life.joined = 0;  // of an attempt before
    life.kv_token_bytes = options_.kv_bytes_scale * double(decode.info.layout.shape.token_bytes());
    life.prefill = "", life.decode = decode.info.name;
  }
  if (attempt.order == DisaggOrder::decode_first) {
    attempt.prefill = -1;  // until one takes the job
  } else {
    charge(attempt, members_.at(attempt.prefill));
  }
  board_.decodes(decode, count, attempt.context);
  decode.decoding.insert(number);
  for (int c = first; c < first + count; ++c) {
    Choice& one = entry.choices[size_t(c)];
    one.attempt = number;
    one.placed = one.output.size();
    if (entry.tries == 0) one.ttft_s = ttft_s, one.tbt_s = d.step_with_s;
  }
  bool keep = true;
  if (fetches && request.prompt_logprobs < 0) {  // whose KV nobody can have
    attempt.lender = fetch.holders[0];
    attempt.lends_s = fetch.view.bytes_s;
    members_.at(attempt.lender).load.lends_s += attempt.lends_s;
    keep = options_.replication->keeps(heat);
    if (log) log->decided(clock_.now(), "replicate", options_.replication->name, id, heat, NoOptions{}, keep);
  } else {
    fetch.holders.clear();
  }
  constexpr double kPatience = 30;  // seconds
  StartRequest message{
      .attempt = number,
      .request = entry.request,
      .state = {.choice = first,
                .stands_for = count,
                .output = choice.output,
                .logits_hash = choice.logits_hash,
                .queued_s = request.arrival_s,
                .scheduled_s = choice.scheduled_s},
      .order = attempt.order,
      .decode = attempt.decode,
      .fetch = {.holders = std::move(fetch.holders),
                .tokens = fetch.view.holder_tokens,
                .worth_s = fetch.view.saved_s,
                .limit_s = options_.fetch->most > 0 ? options_.fetch->most * fetch.view.saved_s : kPatience,
                .keep = keep}};
  const bool at_decode = attempt.order == DisaggOrder::decode_first || attempt.order == DisaggOrder::local;
  const InstanceId to = at_decode ? attempt.decode : attempt.prefill;
  attempts_.emplace(number, attempt);
  post_.send(kConductor, to, std::move(message));
  return true;
}

Status Conductor::submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) {
  Status taken = ok();
  act([&](Out& out) { taken = take_in(std::move(request), std::move(sink), out); });
  return taken;
}

Status Conductor::take_in(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink, Out& out) {
  const long longest = long(request->prompt.size()) + request->max_tokens;
  if (longest > options_.max_model_len)
    return invalid("prompt and max_tokens need " + std::to_string(longest) + " tokens, the context has " +
                   std::to_string(options_.max_model_len));
  if (draining_) return Error{ErrorCode::unavailable, "the server is shutting down"};
  if (members_.empty()) return Error{ErrorCode::unavailable, "no instance is there"};
  const auto& [max_batch, block_tokens, capacity_blocks] = board_.smallest();
  if (request->n > max_batch)
    return invalid("n is " + std::to_string(request->n) + ", --max-batch is " + std::to_string(max_batch));
  const long blocks = (longest + block_tokens - 1) / block_tokens;
  if (blocks > capacity_blocks)
    return invalid("prompt and max_tokens need " + std::to_string(blocks) + " KV blocks, an instance has " +
                   std::to_string(capacity_blocks));
  const uint64_t id = request->id;
  const int n = request->n;
  Entry& entry = requests_[id];
  entry.request = std::move(request);
  entry.sink = std::move(sink);
  entry.choices.resize(size_t(n));
  entry.left = n;
  const int64_t held = queue_bytes(*entry.request);
  const bool full = queued_bytes_ > 0 && queued_bytes_ + held > options_.max_queue_bytes;
  if (!full && start(id, 0, n, out)) {
    queued_bytes_ += held;
    forget_choice(id, entry);  // where it was refused
    return ok();
  }
  requests_.erase(id);
  return Error{ErrorCode::unavailable,
               full ? "the queue is full (--max-queue-bytes)" : "no instance is there to take the request"};
}

int64_t queue_bytes(const Request& request) {
  size_t ids = request.prompt.size();
  if (const auto& rules = request.sampling.rules) {
    ids += rules->allowed.size() + rules->end_tokens.size() + 2 * rules->bias.size();
    for (const auto& word : rules->bad_words) ids += 8 + word.tokens.size();
  }
  return 4096 + int64_t(ids * sizeof(int32_t));
}

// It waits no more.
void Conductor::begin(Entry& entry) {
  if (!std::exchange(entry.begun, true)) queued_bytes_ -= queue_bytes(*entry.request);
}

// ---- The global prefill queue (decode_first).

void Conductor::on(InstanceId from, PrefillJob job, Out&) {
  auto found = attempts_.find(job.attempt);
  if (found == attempts_.end() || found->second.decode != from) return;
  if (found->second.order != DisaggOrder::decode_first || std::exchange(found->second.asked, true)) return;
  // Of what it says no more than the number is needed.
  const Entry& entry = requests_.at(found->second.request);
  job.request = entry.request;
  job.state = {.choice = found->second.first,
               .stands_for = found->second.count,
               .output = entry.choices[size_t(found->second.first)].output};
  job.decode = from;
  jobs_.push_back(std::move(job));
  dispatch_jobs();
}

// A prefill instance takes the next job when it has begun with the one before.
void Conductor::dispatch_jobs() {
  while (!jobs_.empty()) {
    Member* best = nullptr;
    for (auto& [id, member] : members_) {
      if (member.draining || member.info.role != Role::prefill ||
          member.load.queued_requests >= options_.prefill_window)
        continue;
      if (!best || member.load.queued_tokens < best->load.queued_tokens) best = &member;
    }
    if (!best) return;
    PrefillJob job = std::move(jobs_.front());
    jobs_.pop_front();
    auto found = attempts_.find(job.attempt);
    if (found == attempts_.end()) continue;
    Attempt& attempt = found->second;
    charge(attempt, *best);
    post_.send(kConductor, attempt.prefill, std::move(job));
  }
}

}  // namespace xpyd::disagg

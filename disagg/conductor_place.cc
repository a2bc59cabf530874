// Conductor: where a request's choices go, and the global prefill queue.
#include <algorithm>
#include <utility>

#include "disagg/conductor.h"
#include "disagg/messages.h"

namespace xpyd::disagg {
namespace {

std::vector<int32_t> tokens_of(const Request& request, const std::vector<int32_t>& output) {
  std::vector<int32_t> tokens = request.prompt;
  tokens.insert(tokens.end(), output.begin(), output.end());
  return tokens;
}

double ratio(double seconds, int64_t n) { return n > 0 ? seconds / double(n) : 0; }

// Of prompts an instance has computed too little to tell from.
constexpr int kFewTokens = 512;

}  // namespace

int Conductor::promised(const Member& member, PromptHashes& prompt) {
  const std::optional<int> known = member.probe->promise(prompt.tokens(), prompt.salt());
  return known ? *known : member.cache.promise(prompt, member.info.block_tokens);
}

// A snapshot and a pure policy. -1: nobody is there.
Placement Conductor::place(PromptHashes& prompt) {
  views_.clear();
  view_ids_.clear();
  for (auto& [id, member] : members_) {
    if (member.draining) continue;
    InstanceView view;
    view.role = member.info.role;
    view.queued_tokens = member.load.queued_tokens;
    view.sequences = member.load.sequences;
    view.available_blocks = member.probe->kv().available();
    if (view.role != Role::decode) view.cached_tokens = promised(member, prompt);
    views_.push_back(view);
    view_ids_.push_back(id);
  }
  return options_.placement->place(
      {.instances = views_, .prompt_tokens = int(prompt.tokens().size()), .random = random_.next()});
}

// As measured, where there is enough to tell from; before, what the model's work takes at the
// machine's peaks: an instance that nobody has used yet is not free, and not out of reach.
void Conductor::add_costs(DisaggView& view, const InstanceStats& prefill, const InstanceStats& decode,
                          const KvShape& shape) const {
  const std::optional<CostPrior>& prior = options_.prior;
  const bool pull = options_.disagg_options.pull;
  const int uncached = std::max(1, view.tokens - view.cached_prefill);
  const double wire_s = (pull ? decode : prefill).wire_s_per_byte;
  view.prefill_s_per_token = ratio(prefill.step_seconds, prefill.prompt_tokens);
  if (prior && prefill.prompt_tokens < kFewTokens)
    view.prefill_s_per_token = seconds(prior->model.prefill(uncached, view.tokens - uncached), prior->rates) / uncached;
  view.decode_s_per_token = view.prefill_s_per_token;
  view.step_s = ratio(decode.step_seconds, decode.steps);
  if (prior && decode.steps == 0)
    view.step_s = seconds(prior->model.decode(std::max(1, view.decode_sequences), view.tokens), prior->rates);
  view.kv_s_per_token = wire_s * double(shape.token_bytes());
  if (prior && wire_s == 0 && !options_.zero_copy)  // a copy on this machine: no wire is faster
    view.kv_s_per_token = 2 * double(shape.token_bytes()) / prior->rates.bytes_per_s;
  view.chunk_tokens = options_.chunk_tokens;
  view.overlap = overlap(options_.stream_kv, pull, shape.n_layers, uncached, options_.chunk_tokens);
}

// Places choices [first, first + count) of a request. False: there is nobody to place them on.
bool Conductor::start(uint64_t id, int first, int count) {
  Entry& entry = requests_.at(id);
  const Request& request = *entry.request;
  Choice& choice = entry.choices[size_t(first)];
  const std::vector<int32_t> tokens = tokens_of(request, choice.output);
  PromptHashes prompt(tokens, request.cache_salt);
  const Placement placed = place(prompt);
  if (placed.prefill < 0 || placed.decode < 0) return false;
  const InstanceView &p = views_[size_t(placed.prefill)], &d = views_[size_t(placed.decode)];

  Attempt attempt{.request = id, .first = first, .count = count, .left = count};
  attempt.decode = view_ids_[size_t(placed.decode)];
  attempt.prefill = view_ids_[size_t(placed.prefill)];
  Member &prefill = members_.at(attempt.prefill), &decode = members_.at(attempt.decode);
  int cached = p.cached_tokens;  // where the prompt is computed
  if (placed.prefill != placed.decode) {
    const InstanceStats ps = prefill.probe->stats(), ds = decode.probe->stats();
    const int cached_decode = promised(decode, prompt);
    DisaggView view{.tokens = int(tokens.size()),
                    .cached_decode = cached_decode,
                    .cached_prefill = p.cached_tokens,
                    .prefill_jobs = int(jobs_.size()),
                    .prefill_queued_tokens = p.queued_tokens,
                    .decode_queued_tokens = d.queued_tokens,
                    .decode_sequences = d.sequences};
    add_costs(view, ps, ds, prefill.info.layout.shape);
    attempt.order = options_.disagg->decide(view, options_.disagg_options);
    if (attempt.order == DisaggOrder::pull && options_.zero_copy) attempt.order = DisaggOrder::push;
    // There P says nothing of the logits that it sees.
    if (attempt.order == DisaggOrder::decode_first && request.prompt_logprobs >= 0) attempt.order = DisaggOrder::push;
    if (attempt.order == DisaggOrder::local) cached = cached_decode;
  }
  const AttemptId number = ++last_attempt_;
  ++totals_.attempts;
  attempt.uncached = int(tokens.size()) - cached;
  if (attempt.order == DisaggOrder::local) attempt.prefill = attempt.decode;
  if (attempt.order == DisaggOrder::decode_first) {
    attempt.prefill = -1;  // until one takes the job
  } else {
    PlacedLoad& load = members_.at(attempt.prefill).load;
    ++load.queued_requests;
    load.queued_tokens += attempt.uncached;
    attempt.queued = attempt.prompting = true;
  }
  decode.load.sequences += count;
  for (int c = first; c < first + count; ++c) {
    entry.choices[size_t(c)].attempt = number;
    entry.choices[size_t(c)].placed = entry.choices[size_t(c)].output.size();
  }
  StartRequest message{.attempt = number,
                       .request = entry.request,
                       .state = {.choice = first,
                                 .stands_for = count,
                                 .output = choice.output,
                                 .logits_hash = choice.logits_hash,
                                 .queued_s = request.arrival_s,
                                 .scheduled_s = choice.scheduled_s},
                       .order = attempt.order,
                       .decode = attempt.decode};
  const bool at_decode = attempt.order == DisaggOrder::decode_first || attempt.order == DisaggOrder::local;
  const InstanceId to = at_decode ? attempt.decode : attempt.prefill;
  attempts_.emplace(number, attempt);
  post_.send(kConductor, to, std::move(message));
  return true;
}

Status Conductor::submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) {
  const long longest = long(request->prompt.size()) + request->max_tokens;
  if (longest > options_.max_model_len)
    return invalid("prompt and max_tokens need " + std::to_string(longest) + " tokens, the context has " +
                   std::to_string(options_.max_model_len));
  std::lock_guard lock(mutex_);
  if (draining_) return Error{ErrorCode::unavailable, "the server is shutting down"};
  if (members_.empty()) return Error{ErrorCode::unavailable, "no instance is there"};
  for (const auto& [id, member] : members_) {
    const InstanceInfo& info = member.info;
    if (request->n > info.max_batch)
      return invalid("n is " + std::to_string(request->n) + ", --max-batch is " + std::to_string(info.max_batch));
    const long blocks = (longest + info.block_tokens - 1) / info.block_tokens;
    if (blocks > info.capacity_blocks)
      return invalid("prompt and max_tokens need " + std::to_string(blocks) + " KV blocks, an instance has " +
                     std::to_string(info.capacity_blocks));
  }
  const uint64_t id = request->id;
  const int n = request->n;
  Entry& entry = requests_[id];
  entry.request = std::move(request);
  entry.sink = std::move(sink);
  entry.choices.resize(size_t(n));
  entry.left = n;
  const int64_t held = queue_bytes(*entry.request);
  const bool full = queued_bytes_ > 0 && queued_bytes_ + held > options_.max_queue_bytes;
  if (!full && start(id, 0, n)) {
    queued_bytes_ += held;
    return ok();
  }
  requests_.erase(id);
  return Error{ErrorCode::unavailable,
               full ? "the queue is full (--max-queue-bytes)" : "no instance is there to take the request"};
}

int64_t queue_bytes(const Request& request) { return 4096 + int64_t(request.prompt.size() * sizeof(int32_t)); }

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
    attempt.prefill = best->info.id;
    attempt.queued = attempt.prompting = true;
    ++best->load.queued_requests;
    best->load.queued_tokens += attempt.uncached;
    post_.send(kConductor, attempt.prefill, std::move(job));
  }
}

}  // namespace xpyd::disagg

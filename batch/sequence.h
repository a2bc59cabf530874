// One choice of one request on its way through an instance.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "allocator/kv_memory.h"
#include "base/random.h"
#include "batch/draft_length.h"
#include "batch/drafter.h"
#include "batch/output_text.h"
#include "batch/request.h"

namespace xpyd::batch {

// One choice (or all n of them, before their first token) as it stands between two instances, or as
// it goes on after a failure: a plain value, from which its sampler and its text follow.
struct ChoiceState {
  int choice = 0;
  int stands_for = 1;           // choices [choice, choice + stands_for); more than one: no output yet
  std::vector<int32_t> output;  // tokens that the client has, or that are on their way to it
  uint64_t logits_hash = 0;     // of the rows they were sampled from
  int cached_tokens = 0;
  int preemptions = 0;
  double queued_s = 0, scheduled_s = 0;  // Clock; 0: not yet
  int hidden_tokens = 0;                 // a multi-token head: `hidden` is of the last of so many tokens; 0: not known
  std::vector<float> hidden = {};        // HiddenStates::before
};

// Under which its KV is found again. A prefix cache holds no logits: where those of the prompt are
// wanted, each attempt has a salt of its own, the same on all instances.
inline uint64_t kv_salt(const Request& request, uint64_t attempt) {
  if (request.prompt_logprobs < 0) return request.cache_salt;
  return Random(request.cache_salt ^ Random(request.id ^ attempt << 32).next()).next() | 1;
}

// Owner: the engine (or the P/D state machine) that holds it, one at a time; it moves between
// instances by value of this pointer. Until its first token is sampled one sequence stands for all
// n choices, because they share the prompt's KV; then it splits.
struct Sequence {
  std::shared_ptr<const Request> request;
  std::shared_ptr<EventSink> sink;
  std::shared_ptr<std::atomic<bool>> cancelled;  // set by Service::abort; looked at between iterations
  // Whoever counts load gives these; letting go of them counts down.
  std::shared_ptr<void> queue_ticket;   // until the first step
  std::shared_ptr<void> prompt_ticket;  // until the prompt is done: held by this object, not by its choices

  int choice = 0;
  int stands_for = 1;    // choices that this sequence still stands for: [choice, choice + stands_for)
  uint64_t attempt = 0;  // of the conductor's, to serve it (disagg/messages.h)
  bool leaves = false;   // its KV goes to another instance when the given tokens are computed
  int given = 0;         // tokens that this instance was given: the prompt, and what was put out before

  // Prompt, then output; below 0: being chosen (batch/engine/engine.cc). While a step computes drafts they are the last
  // ones.
  std::vector<int32_t> tokens;
  int computed = 0;       // tokens whose KV is in place or under way, on the instance that holds it
  KvHandle kv = kNoKv;    // in that instance's memory
  int cached_tokens = 0;  // prompt tokens found in a prefix cache at first admission
  int preemptions = 0;    // times it lost its memory

  SamplerState sampler;
  OutputText text;
  uint64_t logits_hash = 0;              // of the logits rows that were sampled, in order (base/row_hash.h)
  std::vector<Sampled> prompt_logprobs;  // [n_prompt] while they are wanted: those computed so far
  std::unique_ptr<DraftMemory> drafts;   // the drafter's
  DraftRecord draft_record;
  int hidden_tokens = 0;      // as of ChoiceState
  std::vector<float> hidden;  // …

  double queued_s = 0, scheduled_s = 0;  // Clock: reached the first engine, first step
  int row = -1;                          // in a persistent batch (batch/step_arrays.h)
  bool scheduled = false;                // has run at least once, somewhere
  bool probed = false;                   // the engine has looked for its KV, in memory and in tiers
  bool early = false;                    // holds memory before its turn, for KV that comes from a tier
  bool loading = false;                  // … and that KV is still on its way,
  double load_s = 0;                     // … since then (Clock)
  std::shared_ptr<KvArrival> arrival;    // of the first `computed` tokens; null: they are there

  int n_prompt() const { return int(request->prompt.size()); }
  int n_output() const { return int(tokens.size()) - n_prompt(); }
  int pending() const { return int(tokens.size()) - computed; }
  uint64_t salt() const { return kv_salt(*request, attempt); }
  // It holds memory that nobody but preemption takes from it.
  bool keeps_kv() const { return kv != kNoKv && !early; }
  bool wants_prompt_logprobs() const { return request->prompt_logprobs >= 0 && n_output() == 0; }
};

using SequencePtr = std::unique_ptr<Sequence>;

// `state`: what of it exists already. The tokenizer (null: no text) and the request are those it began with.
SequencePtr make_sequence(std::shared_ptr<const Request> request, const ChoiceState& state,
                          std::shared_ptr<EventSink> sink, std::shared_ptr<std::atomic<bool>> cancelled,
                          const Tokenizer* tokenizer);
ChoiceState state_of(const Sequence& sequence);
// KvMemory::append() of room for n_tokens beyond those computed or under way.
[[nodiscard]] bool append_room(KvMemory& memory, const Sequence& sequence, int n_tokens);
// What a choice has of its own, its sampler and its text, begins with its first token. Later calls do nothing.
void open_choice(Sequence& sequence, int choice, const Tokenizer* tokenizer);

// What every event of a choice says; the token, or the end, is the caller's.
TokenEvent event_of(const Sequence& sequence, int choice, double now);
// Ends the choices that `sequence` stands for without a token.
void emit_end(const Sequence& sequence, FinishReason reason, const std::string& error, double now);

}  // namespace xpyd::batch

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

// One choice (or all n of them, before their first token) as a plain value, for transfer to another instance and for
// recovery after a failure. make_sequence() rebuilds sampler and text from it.
struct ChoiceState {
  int choice = 0;
  int stands_for = 1;           // choices [choice, choice + stands_for); above 1 there is no output yet
  std::vector<int32_t> output;  // tokens that the client has or that are on their way to it
  uint64_t logits_hash = 0;     // of the logits rows from which `output` was sampled, in order (base/row_hash.h)
  int cached_tokens = 0;        // prompt tokens found in a prefix cache at first admission
  double queued_s = 0, scheduled_s = 0;  // Clock: arrival at the first engine, first step; 0: not yet
  int hidden_tokens = 0;                 // `hidden` belongs to the last of this many tokens; 0: not known
  std::vector<float> hidden = {};        // HiddenStates::before, for a multi-token head
};

// The salt under which a prefix cache finds this request's KV. A prefix cache holds no logits, so a request that wants
// prompt logprobs gets a salt of its own for each attempt. All instances compute the same one.
inline uint64_t kv_salt(const Request& request, uint64_t attempt) {
  if (request.prompt_logprobs < 0) return request.cache_salt;
  return Random(request.cache_salt ^ Random(request.id ^ attempt << 32).next()).next() | 1;
}

// Owner: one engine, or the P/D state machine, holds the pointer at a time. Until the first token is sampled, one
// sequence stands for all n choices, because they share the prompt's KV; then it splits. `output` is empty here: it is
// the end of `tokens`.
struct Sequence : ChoiceState {
  std::shared_ptr<const Request> request;
  std::shared_ptr<EventSink> sink;
  std::shared_ptr<std::atomic<bool>> cancelled;  // Service::abort sets it; the engine reads it between iterations
  // Tickets of a load counter. Destroying a ticket reduces the count.
  std::shared_ptr<void> queue_ticket;   // until the first step
  std::shared_ptr<void> prompt_ticket;  // until the prompt is computed: this object holds it, its choices do not

  uint64_t attempt = 0;  // the conductor's number of this try to serve it (disagg/messages.h)
  bool leaves = false;   // its KV moves to another instance once the given tokens are computed
  int given = 0;         // tokens that this instance received: the prompt and earlier output

  // Prompt, then output. A negative id is a token that the model is still choosing (steps.h). While a step computes
  // drafts, they are the last entries.
  std::vector<int32_t> tokens;
  int computed = 0;     // tokens whose KV is computed or being computed on the instance that holds it
  KvHandle kv = kNoKv;  // in that instance's memory

  SamplerState sampler;
  OutputText text;
  std::vector<Sampled> prompt_logprobs;  // [n_prompt] if requested: those computed so far
  std::unique_ptr<DraftMemory> drafts;   // per-sequence state of the drafter
  DraftRecord draft_record;

  bool scheduled = false;              // it has run at least once, on some instance
  bool probed = false;                 // the engine has looked for its KV in memory and offload
  bool early = false;                  // it holds memory before its turn, while its KV is loaded
  bool loading = false;                // that KV is still being loaded
  double load_s = 0;                   // Clock: when the load began

  int n_prompt() const { return int(request->prompt.size()); }
  int n_output() const { return int(tokens.size()) - n_prompt(); }
  int pending() const { return int(tokens.size()) - computed; }
  uint64_t salt() const { return kv_salt(*request, attempt); }
  // Only preemption can take its memory. Memory that it got early can be taken back.
  bool keeps_kv() const { return kv != kNoKv && !early; }
  // Why it ends unfinished: its client has gone, or has no more time. None: it goes on.
  FinishReason over(double now) const {
    if (cancelled && cancelled->load(std::memory_order_relaxed)) return FinishReason::abort;
    return request->deadline_s > 0 && now > request->deadline_s ? FinishReason::timeout : FinishReason::none;
  }
  bool wants_prompt_logprobs() const { return request->prompt_logprobs >= 0 && n_output() == 0; }
};

using SequencePtr = std::unique_ptr<Sequence>;

// Builds a sequence from `state`. A null tokenizer means no text. Tokenizer and request must be those with which the
// state began.
SequencePtr make_sequence(std::shared_ptr<const Request> request, const ChoiceState& state,
                          std::shared_ptr<EventSink> sink, std::shared_ptr<std::atomic<bool>> cancelled,
                          const Tokenizer* tokenizer);
ChoiceState state_of(const Sequence& sequence);
// Calls KvMemory::append() for n_tokens beyond those computed or being computed. False: there are not enough blocks.
[[nodiscard]] bool append_room(KvMemory& memory, const Sequence& sequence, int n_tokens);
// Starts the sampler and the text of `choice`, at its first token. Later calls do nothing.
void open_choice(Sequence& sequence, int choice, const Tokenizer* tokenizer);

// Fills the fields that every event of a choice has. The caller adds the token or the finish reason.
TokenEvent event_of(const Sequence& sequence, int choice, double now);
// Ends the choices that `sequence` stands for, without a token.
void emit_end(const Sequence& sequence, FinishReason reason, const std::string& error, double now);

}  // namespace xpyd::batch

// The fields of every control message, in the order in which they cross: read it as the format (disagg/net/fields.h
// says how). A new member does not compile until it is here; tests/disagg/codec_test.cc then fails until it is sent,
// too.
//
// To the archives of fields.h codec.cc adds:
//   number(name, x, Number), numbers(name, v, Number)   ranges.h has the table
//   time(name, x): Clock seconds, as an age             request(name, shared Request)
// and XPYD_NUMBERS(a, Number, x, y, …) is number() of each, XPYD_SECONDS of durations, XPYD_TIMES time().
#pragma once

#include "disagg/control/ranges.h"
#include "disagg/messages.h"
#include "disagg/net/fields.h"

namespace xpyd::disagg::codec {

inline constexpr int kMaxStops = 64;  // stop strings
inline constexpr int kMaxTopLogprobs = 64;
inline constexpr size_t kMaxPromptLogprobs = 1 << 20;  // tokens
inline constexpr double kMaxSeconds = 1e12;

}  // namespace xpyd::disagg::codec

#define XPYD_EACH_AS(call, ...) each_field<#__VA_ARGS__>([&](const char* name_, auto& value_) { call; }, __VA_ARGS__)
#define XPYD_NUMBERS(a, range, ...) XPYD_EACH_AS(a.number(name_, value_, range), __VA_ARGS__)
#define XPYD_SECONDS(a, ...) XPYD_EACH_AS(a.number(name_, value_, 0, codec::kMaxSeconds), __VA_ARGS__)
#define XPYD_TIMES(a, ...) XPYD_EACH_AS(a.time(name_, value_), __VA_ARGS__)

namespace xpyd::disagg {

template <>
inline constexpr FinishReason kLast<FinishReason> = FinishReason::refused;
template <>
inline constexpr Dtype kLast<Dtype> = Dtype::int4;
template <>
inline constexpr KvOrder kLast<KvOrder> = KvOrder::token_major;
template <>
inline constexpr Tier kLast<Tier> = Tier::disk;
template <>
inline constexpr Role kLast<Role> = Role::colocated;
template <>
inline constexpr DisaggOrder kLast<DisaggOrder> = DisaggOrder::decode_first;
template <>
inline constexpr AttemptProgress::Stage kLast<AttemptProgress::Stage> = AttemptProgress::joined;
template <>
inline constexpr AttemptFailure kLast<AttemptFailure> = AttemptFailure::refused;

template <class A>
void fields(A& a, typename A::template Ref<SamplingParams> s) {
  auto& [temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed,
         top_logprobs] = s;
  XPYD_EACH(a, seed);
  a.number("temperature", temperature, 0, 1e6);
  a.number("top_k", top_k, Number::natural);
  a.number("top_p", top_p, 0, 1);
  a.number("min_p", min_p, 0, 1);
  a.number("repetition_penalty", repetition_penalty, 0, 1e6);
  a.number("presence_penalty", presence_penalty, -1e6, 1e6);
  a.number("frequency_penalty", frequency_penalty, -1e6, 1e6);
  a.number("top_logprobs", top_logprobs, Number::top_logprobs);
}

template <class A>
void fields(A& a, typename A::template Ref<Request> s) {
  auto& [id, prompt, sampling, max_tokens, min_tokens, n, prompt_logprobs, ignore_eos, stop, stop_token_ids,
         include_stop_text, skip_special_tokens, prompt_is_text_prefix, priority, cache_salt, session_id, arrival_s,
         deadline_s, slo_ttft_s, slo_tbt_s] = s;
  XPYD_EACH(a, id, sampling, ignore_eos, include_stop_text, skip_special_tokens, prompt_is_text_prefix, cache_salt,
            session_id);
  a.numbers("prompt", prompt, Number::token);
  a.number("max_tokens", max_tokens, Number::tokens_some);
  a.number("min_tokens", min_tokens, Number::tokens);
  a.number("n", n, Number::choices);
  a.number("prompt_logprobs", prompt_logprobs, Number::top_logprobs);
  a.list("stop", stop, codec::kMaxStops);
  a.numbers("stop_token_ids", stop_token_ids, Number::token);
  a.number("priority", priority);
  XPYD_TIMES(a, arrival_s, deadline_s);
  XPYD_SECONDS(a, slo_ttft_s, slo_tbt_s);
}

template <class A>
void fields(A& a, typename A::template Ref<ChoiceState> s) {
  auto& [choice, stands_for, output, logits_hash, cached_tokens, preemptions, queued_s, scheduled_s] = s;
  XPYD_EACH(a, logits_hash);
  a.number("choice", choice, Number::choice);
  a.number("stands_for", stands_for, Number::choices);
  a.numbers("output", output, Number::token);
  a.number("cached_tokens", cached_tokens, Number::tokens);
  a.number("preemptions", preemptions, Number::count);
  XPYD_TIMES(a, queued_s, scheduled_s);
}

template <class A>
void fields(A& a, typename A::template Ref<TokenLogprob> s) {
  auto& [token, logprob] = s;
  a.number("token", token, Number::token);
  a.number("logprob", logprob);  // may be -infinity
}

template <class A>
void fields(A& a, typename A::template Ref<Sampled> s) {
  auto& [chosen, top, nan_logits, rank] = s;
  XPYD_EACH(a, chosen);
  a.list("top", top, codec::kMaxTopLogprobs);
  XPYD_NUMBERS(a, Number::natural, nan_logits, rank);
}

template <class A>
void fields(A& a, typename A::template Ref<TokenEvent> s) {
  auto& [request_id, choice, token, text, finish, stop_text, stop_token, error, retry_s, has_logprobs, sampled,
         prompt_logprobs, cached_tokens, preemptions, logits_hash, queued_s, scheduled_s, time_s] = s;
  XPYD_EACH(a, request_id, text, finish, stop_text, error, has_logprobs, sampled, logits_hash);
  a.number("choice", choice, Number::choice);
  XPYD_NUMBERS(a, Number::token_or_none, token, stop_token);
  a.list("prompt_logprobs", prompt_logprobs, codec::kMaxPromptLogprobs);
  a.number("cached_tokens", cached_tokens, Number::tokens);
  a.number("preemptions", preemptions, Number::count);
  XPYD_SECONDS(a, retry_s);
  XPYD_TIMES(a, queued_s, scheduled_s, time_s);
}

template <class A>
void fields(A& a, typename A::template Ref<KvShape> s) {
  auto& [n_layers, n_kv_heads, head_dim, dtype] = s;
  XPYD_EACH(a, dtype);
  a.number("n_layers", n_layers, Number::layers);
  a.number("n_kv_heads", n_kv_heads, Number::heads);
  a.number("head_dim", head_dim, Number::head_dim);
}

template <class A>
void fields(A& a, typename A::template Ref<KvLayout> s) {
  auto& [shape, order, block_tokens, n_blocks] = s;
  XPYD_EACH(a, shape, order);
  XPYD_NUMBERS(a, Number::count, block_tokens, n_blocks);
}

template <class A>
void fields(A& a, typename A::template Ref<KvShards> s) {
  auto& [n_layers, n_kv_heads, tp, pp, long_stage, stage_layers] = s;
  a.number("n_layers", n_layers, Number::layers);
  a.number("n_kv_heads", n_kv_heads, Number::heads);
  XPYD_NUMBERS(a, Number::ranks, tp, pp);
  a.number("long_stage", long_stage, Number::stage);
  a.numbers("stage_layers", stage_layers, Number::layers);
}

template <class A>
void fields(A& a, typename A::template Ref<InstanceInfo> s) {
  auto& [id, name, role, layout, shards, stages, capacity_blocks, block_tokens, tier_blocks, max_batch, address,
         control, kv_events, kv_events_replay] = s;
  XPYD_EACH(a, name, role, layout, shards, address, control, kv_events, kv_events_replay);
  a.number("id", id, Number::instance);
  a.number("stages", stages, Number::ranks);
  XPYD_NUMBERS(a, Number::count, capacity_blocks, block_tokens, tier_blocks, max_batch);
}

template <class A>
void fields(A& a, typename A::template Ref<KvPlace> s) {
  auto& [window, blocks, slot, cached_tokens, checksums] = s;
  XPYD_EACH(a, window, checksums);
  a.numbers("blocks", blocks, Number::block);
  a.number("slot", slot, Number::block);
  a.number("cached_tokens", cached_tokens, Number::tokens);
}

template <class A>
void fields(A& a, typename A::template Ref<KvHandover> s) {
  auto& [blocks, tokens, generations, giver] = s;
  XPYD_EACH(a, generations);
  a.numbers("blocks", blocks, Number::block);
  a.number("tokens", tokens, Number::tokens);
  a.number("giver", giver, Number::member);  // -1 stays in its process
}

template <class A>
void fields(A& a, typename A::template Ref<KvTierStats> s) {
  auto& [host_blocks, host_capacity, disk_blocks, disk_capacity, bytes_out, bytes_in, copies_out, copies_in,
         disk_bytes_written, disk_bytes_read, host_hit_tokens, disk_hit_tokens, host_evictions, disk_evictions,
         host_relieved, failed_writes, failed_reads, corrupt_reads, dropped_out, load_wait_seconds] = s;
  XPYD_NUMBERS(a, Number::total, host_blocks, host_capacity, disk_blocks, disk_capacity, bytes_out, bytes_in,
               copies_out, copies_in, disk_bytes_written, disk_bytes_read, host_hit_tokens, disk_hit_tokens,
               host_evictions, disk_evictions, host_relieved, failed_writes, failed_reads, corrupt_reads, dropped_out);
  XPYD_SECONDS(a, load_wait_seconds);
}

template <class A>
void fields(A& a, typename A::template Ref<VattentionStats> s) {
  auto& [map_calls, unmap_calls, waited_jobs, map_wait_seconds] = s;
  XPYD_NUMBERS(a, Number::total, map_calls, unmap_calls, waited_jobs);
  XPYD_SECONDS(a, map_wait_seconds);
}

template <class A>
void fields(A& a, typename A::template Ref<KvStats> s) {
  auto& [capacity, free, active, cached, in_transfer, escrowed, elsewhere, soft_pinned, hard_pinned, block_tokens,
         prefix_query_tokens, prefix_hit_tokens, evictions, cow_copies, vattention, capacity_bytes, written_bytes,
         reserved_bytes, internal_bytes, idle_bytes, external_bytes, mapped_bytes, mappings, tiers] = s;
  XPYD_EACH(a, vattention, tiers);
  XPYD_NUMBERS(a, Number::count, capacity, free, active, cached, in_transfer, escrowed, elsewhere, soft_pinned,
               hard_pinned, block_tokens);
  XPYD_NUMBERS(a, Number::total, prefix_query_tokens, prefix_hit_tokens, evictions, cow_copies, capacity_bytes,
               written_bytes, reserved_bytes, internal_bytes, idle_bytes, external_bytes, mapped_bytes, mappings);
}

template <class A>
void fields(A& a, typename A::template Ref<PredictionError> s) {
  auto& [n, absolute, signed_sum] = s;
  XPYD_SECONDS(a, n, absolute);
  a.number("signed_sum", signed_sum, -codec::kMaxSeconds, codec::kMaxSeconds);
}

template <class A>
void fields(A& a, typename A::template Ref<FetchStats> s) {
  auto& [fetches, tokens, failed, lent, lent_tokens, expired, relayed, seconds, wait_s, regret_s, ask_s] = s;
  XPYD_NUMBERS(a, Number::total, fetches, tokens, failed, lent, lent_tokens, expired, relayed);
  XPYD_SECONDS(a, seconds, wait_s, regret_s, ask_s);
}

template <class A>
void fields(A& a, typename A::template Ref<InstanceStats> s) {
  auto& [name, running, waiting, queue_remote_prefilling, queue_prefill_sending, kv, steps, prompt_tokens,
         generated_tokens, preemptions, draft_tokens, accepted_tokens, chunk_decisions, chunk_extrapolations, step_seconds,
         schedule_seconds,
         wait_seconds, transfer_bytes, transfer_descriptors, transfers, transfer_seconds, wire_s_per_byte, kv_refused,
         leases_expired, fetch, heartbeat_s, cost, cost_error] = s;
  auto& [cost_step, cost_token, cost_prefix, cost_attended, cost_decode, cost_context] = cost;
  XPYD_EACH(a, name, kv, fetch, cost_error);
  XPYD_SECONDS(a, cost_step, cost_token, cost_prefix, cost_attended, cost_decode, cost_context);
  XPYD_NUMBERS(a, Number::count, running, waiting, queue_remote_prefilling, queue_prefill_sending);
  XPYD_NUMBERS(a, Number::total, steps, prompt_tokens, generated_tokens, preemptions, draft_tokens, accepted_tokens,
               chunk_decisions, chunk_extrapolations, transfer_bytes, transfer_descriptors, transfers, kv_refused, leases_expired);
  XPYD_SECONDS(a, step_seconds, schedule_seconds, wait_seconds, transfer_seconds, wire_s_per_byte);
  XPYD_TIMES(a, heartbeat_s);
}

// ---- the messages

template <class A>
void fields(A& a, typename A::template Ref<FetchOrder> s) {
  auto& [holders, tokens, worth_s, limit_s, keep, via] = s;
  XPYD_EACH(a, keep);
  a.number("via", via, Number::instance_or_none);
  a.numbers("holders", holders, Number::instance);
  a.number("tokens", tokens, Number::tokens);
  XPYD_SECONDS(a, worth_s, limit_s);
}

template <class A>
void fields(A& a, typename A::template Ref<StartRequest> s) {
  auto& [attempt, request, state, order, decode, fetch] = s;
  XPYD_EACH(a, attempt, request, state, order, fetch);
  a.number("decode", decode, Number::instance_or_none);
}

XPYD_FIELDS(AbortAttempt, attempt)
XPYD_FIELDS(PeerJoined, info)

template <class A>
void fields(A& a, typename A::template Ref<PeerGone> s) {
  auto& [id] = s;
  a.number("id", id, Number::instance);
}

template <class A>
void fields(A& a, typename A::template Ref<TokenOf> s) {
  auto& [attempt, index, event] = s;
  XPYD_EACH(a, attempt, event);
  a.number("index", index, Number::tokens);
}

template <class A>
void fields(A& a, typename A::template Ref<TokensOf> s) {
  auto& [attempt, choice, index, tokens, times_s] = s;
  XPYD_EACH(a, attempt);
  a.numbers("times_s", times_s);
  a.number("choice", choice, Number::choice);
  a.number("index", index, Number::tokens);
  a.numbers("tokens", tokens, Number::token);
}

XPYD_FIELDS(AttemptProgress, attempt, stage)
XPYD_FIELDS(AttemptFailed, attempt, reason, why)
XPYD_FIELDS(Report, stats)

template <class A>
void fields(A& a, typename A::template Ref<PrefillJob> s) {
  auto& [attempt, request, state, decode] = s;
  XPYD_EACH(a, attempt, request, state);
  a.number("decode", decode, Number::instance_or_none);
}

XPYD_FIELDS(ReserveKv, attempt, request, state)
XPYD_FIELDS(KvReserved, attempt, destination)

template <class A>
void fields(A& a, typename A::template Ref<KvDelivered> s) {
  auto& [attempt, choices, kv_arrived, posts, checksums, handover] = s;
  XPYD_EACH(a, attempt, kv_arrived, checksums, handover);
  a.list("choices", choices, kMaxChoices);
  a.number("posts", posts, Number::post);
}

XPYD_FIELDS(ReservationCancelled, attempt)

template <class A>
void fields(A& a, typename A::template Ref<KvOffered> s) {
  auto& [attempt, request, choices, source] = s;
  XPYD_EACH(a, attempt, request, source);
  a.list("choices", choices, kMaxChoices);
}

XPYD_FIELDS(KvTaken, attempt)
XPYD_FIELDS(KvRenewed, attempts)

template <class A>
void fields(A& a, typename A::template Ref<PeerBroken> s) {
  auto& [id] = s;
  a.number("id", id, Number::instance);
}

XPYD_FIELDS(ClearPrefixCache)

template <class A>
void fields(A& a, typename A::template Ref<Welcome> s) {
  auto& [id, name, role, lease_s, pool, report_cache, local] = s;
  XPYD_EACH(a, name, role, pool, report_cache, local);
  a.number("id", id, Number::instance);
  XPYD_SECONDS(a, lease_s);
}

XPYD_FIELDS(Retire, rejoin, role)
XPYD_FIELDS(JoinRequest, role)
XPYD_FIELDS(Joined, info)
XPYD_FIELDS(LeaveRequest)
XPYD_FIELDS(CacheReport, tier, stored, removed)

template <class A>
void fields(A& a, typename A::template Ref<FetchKv> s) {
  auto& [attempt, salt, begin, tokens, holders, request, limit_s] = s;
  XPYD_EACH(a, attempt, salt, request);
  a.number("begin", begin, Number::tokens);
  a.numbers("tokens", tokens, Number::token);
  a.numbers("holders", holders, Number::instance);
  XPYD_SECONDS(a, limit_s);
}

template <class A>
void fields(A& a, typename A::template Ref<KvLent> s) {
  auto& [attempt, tokens, source] = s;
  XPYD_EACH(a, attempt, source);
  a.number("tokens", tokens, Number::tokens);
}

XPYD_FIELDS(FetchOver, attempt)

template <class A>
void fields(A& a, typename A::template Ref<PinPrefix> s) {
  auto& [id, salt, tokens, soft, ttl_s] = s;
  XPYD_EACH(a, id, salt, soft);
  a.numbers("tokens", tokens, Number::token);
  XPYD_SECONDS(a, ttl_s);
}

XPYD_FIELDS(UnpinPrefix, id)

template <class A>
void fields(A& a, typename A::template Ref<KvHint> s) {
  auto& [salt, tokens, kept, ttl_s] = s;
  XPYD_EACH(a, salt);
  a.numbers("tokens", tokens, Number::token);
  a.number("kept", kept, Number::tokens);
  XPYD_SECONDS(a, ttl_s);
}

}  // namespace xpyd::disagg

// The fields of every control message, in the order in which they are sent (format: disagg/net/fields.h). A new member
// does not compile until it is listed here, and tests/disagg/codec_test.cc fails until it arrives. The range of an
// integer follows from its name, which means the same in every message (ranges.h). Without a row there, an int is a
// count and an int64_t a total. A double is a duration in seconds.
//
// codec.cc adds to the archives of fields.h:
//   number(name, x, Number), numbers(name, v, Number)   ranges.h has the table
//   time(name, x): Clock seconds, as an age             request(name, shared Request), rules(name, shared TokenRules)
#pragma once

#include "disagg/messages.h"
#include "disagg/net/fields.h"
#include "disagg/processes/ranges.h"

namespace xpyd::disagg {

template <>
inline constexpr FinishReason kLast<FinishReason> = FinishReason::refused;
template <>
inline constexpr Dtype kLast<Dtype> = kLastKvDtype;
template <>
inline constexpr KvOrder kLast<KvOrder> = KvOrder::token_major;
template <>
inline constexpr Tier kLast<Tier> = Tier::disk;
template <>
inline constexpr Role kLast<Role> = Role::colocated;
template <>
inline constexpr DisaggOrder kLast<DisaggOrder> = DisaggOrder::decode_first;
template <>
inline constexpr AttemptProgress::Stage kLast<AttemptProgress::Stage> = AttemptProgress::granted;
template <>
inline constexpr AttemptFailure kLast<AttemptFailure> = AttemptFailure::refused;

namespace codec {

inline constexpr double kMaxSeconds = 1e12;

template <class V>
concept NumberWithSign = std::is_same_v<V, int32_t> || std::is_same_v<V, int64_t>;
// clang-format off
template <class V>
concept List = requires(V list) { list.emplace_back(); } &&
               !std::is_same_v<V, std::string> && !std::is_arithmetic_v<typename V::value_type>;
// clang-format on

template <Number kind, size_t most, class A, class T>
void message_field(A& a, const char* name, T& value) {
  using V = std::remove_const_t<T>;
  if constexpr (kind == Number::time)
    a.time(name, value);
  else if constexpr (std::is_same_v<V, double>)
    a.number(name, value, 0, kMaxSeconds);
  else if constexpr (std::is_same_v<V, model::StepCost::Terms>)
    for (auto& term : value) a.number(name, term, 0, kMaxSeconds);
  else if constexpr (NumberWithSign<V>)
    a.number(name, value, kind);
  else if constexpr (std::is_same_v<V, std::vector<int32_t>>)
    a.numbers(name, value, kind);
  else if constexpr (List<V>)
    a.list(name, value, most);
  else
    field(a, name, value);
}

template <FieldNames names, class A, class... T>
void message_fields(A& a, T&... values) {
  [&]<size_t... i>(std::index_sequence<i...>) {
    (message_field<number_of<std::remove_const_t<T>>(names.at(i)), most_of(names.at(i))>(a, names.at(i).data(), values),
     ...);
  }
  (std::index_sequence_for<T...>());
}

}  // namespace codec

#define XPYD_MESSAGE(Struct, ...)                         \
  template <class A>                                      \
  void fields(A& a, typename A::template Ref<Struct> s) { \
    auto& [__VA_ARGS__] = s;                              \
    codec::message_fields<#__VA_ARGS__>(a, __VA_ARGS__);  \
  }

template <class A>
void fields(A& a, typename A::template Ref<model::TokenBias> s) {
  auto& [token, bias] = s;
  a.number("token", token, Number::token);
  a.number("bias", bias, -1e6, 1e6);
}

template <class A>
void fields(A& a, typename A::template Ref<model::BadWord> s) {
  auto& [tokens] = s;
  a.numbers("bad_words", tokens, Number::token);
}

template <class A>
void fields(A& a, typename A::template Ref<model::TokenRules> s) {
  auto& [allowed, bias, bad_words, end_tokens, min_tokens] = s;
  a.numbers("allowed", allowed, Number::token);
  a.list("bias", bias, 1 << 16);
  a.list("bad_words", bad_words, 1 << 16);
  a.numbers("end_tokens", end_tokens, Number::token);
  a.number("min_tokens", min_tokens, Number::tokens);
}

template <class A>
void fields(A& a, typename A::template Ref<SamplingParams> s) {
  auto& [temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed, top_logprobs,
         rules] = s;
  XPYD_EACH(a, seed);
  a.number("temperature", temperature, 0, 1e6);
  a.number("top_k", top_k, Number::natural);
  a.number("top_p", top_p, 0, 1);
  a.number("min_p", min_p, 0, 1);
  a.number("repetition_penalty", repetition_penalty, 0, 1e6);
  a.number("presence_penalty", presence_penalty, -1e6, 1e6);
  a.number("frequency_penalty", frequency_penalty, -1e6, 1e6);
  a.number("top_logprobs", top_logprobs, Number::top_logprobs);
  a.rules("rules", rules);
}

template <class A>
void fields(A& a, typename A::template Ref<TokenLogprob> s) {
  auto& [token, logprob] = s;
  a.number("token", token, Number::token);
  a.number("logprob", logprob);  // -infinity is allowed
}

template <class A>
void fields(A& a, typename A::template Ref<PredictionError> s) {
  auto& [n, absolute, signed_sum] = s;
  a.number("n", n, 0, codec::kMaxSeconds);
  a.number("absolute", absolute, 0, codec::kMaxSeconds);
  a.number("signed_sum", signed_sum, -codec::kMaxSeconds, codec::kMaxSeconds);
}

XPYD_MESSAGE(Request, id, prompt, sampling, max_tokens, min_tokens, n, prompt_logprobs, ignore_eos, stop,
             stop_token_ids, include_stop_text, skip_special_tokens, prompt_is_text_prefix, priority, cache_salt,
             session_id, arrival_s, deadline_s, slo_ttft_s, slo_tbt_s, most_drafts)
XPYD_MESSAGE(ChoiceState, choice, stands_for, output, logits_hash, cached_tokens, preemptions, queued_s, scheduled_s,
             hidden_tokens, hidden)
XPYD_MESSAGE(Sampled, chosen, top, rank)
XPYD_MESSAGE(TokenEvent, request_id, choice, token, text, finish, stop_text, stop_token, error, retry_s, has_logprobs,
             sampled, prompt_logprobs, cached_tokens, preemptions, logits_hash, queued_s, scheduled_s, time_s)
XPYD_MESSAGE(KvShape, n_layers, n_kv_heads, head_dim, dtype)
XPYD_MESSAGE(KvLayout, shape, order, block_tokens, n_blocks)
XPYD_MESSAGE(KvShards, n_layers, n_kv_heads, tp, pp)
XPYD_MESSAGE(InstanceInfo, id, name, role, layout, shards, stages, capacity_blocks, block_tokens, tier_blocks,
             max_batch, address, control)
XPYD_MESSAGE(KvPlace, registration, blocks, slot, cached_tokens, checksums)
XPYD_MESSAGE(KvHandover, blocks, tokens, generations, giver)
XPYD_MESSAGE(OffloadStats, host_blocks, host_capacity, disk_blocks, disk_capacity, bytes_out, bytes_in, copies_out,
             copies_in, disk_bytes_written, disk_bytes_read, host_hit_tokens, disk_hit_tokens, host_evictions,
             disk_evictions, host_relieved, failed_writes, failed_reads, corrupt_reads, dropped_out, load_wait_seconds)
XPYD_MESSAGE(VattentionStats, map_calls, unmap_calls, waited_jobs, map_wait_seconds)
XPYD_MESSAGE(KvStats, capacity, free, active, cached, in_transfer, reserved_blocks, elsewhere, block_tokens,
             prefix_query_tokens, prefix_hit_tokens, evictions, cow_copies, vattention, capacity_bytes, written_bytes,
             reserved_bytes, internal_bytes, idle_bytes, external_bytes, mapped_bytes, mappings, tiers)
XPYD_MESSAGE(FetchStats, fetches, tokens, failed, lent, lent_tokens, expired, seconds, wait_s, regret_s, ask_s)
XPYD_MESSAGE(Spent, prefill_gb_s, decode_gb_s, transfer_gb_s, tflop, peak_tflops)
XPYD_MESSAGE(InstanceStats, name, running, waiting, queue_remote_prefilling, queue_prefill_sending, kv, steps,
             prompt_tokens, generated_tokens, preemptions, draft_tokens, accepted_tokens, step_seconds,
             schedule_seconds, wait_seconds, transfers, transfer_bytes, transfer_descriptors, transfer_seconds,
             wire_s_per_byte, kv_refused, leases_expired, fetch, spent, heartbeat_s, cost, cost_error)

// ---- the messages

XPYD_MESSAGE(FetchOrder, holders, tokens, worth_s, limit_s, keep)
XPYD_MESSAGE(StartRequest, attempt, request, state, remote, decode, fetch)
XPYD_MESSAGE(AbortAttempt, attempt)
XPYD_MESSAGE(PeerJoined, info)
XPYD_MESSAGE(PeerGone, id)
XPYD_MESSAGE(TokenOf, attempt, index, event)
XPYD_MESSAGE(AttemptProgress, attempt, stage)
XPYD_MESSAGE(AttemptFailed, attempt, reason, why)
XPYD_MESSAGE(Report, stats)
XPYD_MESSAGE(PrefillJob, attempt, request, state, decode)
XPYD_MESSAGE(ReserveKv, attempt, request, state)
XPYD_MESSAGE(KvReserved, attempt, destination)
XPYD_MESSAGE(KvDelivered, attempt, choices, kv_arrived, posts, checksums, handover)
XPYD_MESSAGE(ReservationCancelled, attempt)
XPYD_MESSAGE(KvOffered, attempt, request, choices, source)
XPYD_MESSAGE(KvTaken, attempt)
XPYD_MESSAGE(KvRenewed, attempts)
XPYD_MESSAGE(PeerBroken, id)
XPYD_FIELDS(ClearPrefixCache)
XPYD_MESSAGE(Welcome, id, name, role, lease_s, pool, report_cache, local, order)
XPYD_MESSAGE(Retire, rejoin, role)
XPYD_MESSAGE(JoinRequest, role)
XPYD_MESSAGE(Joined, info)
XPYD_FIELDS(LeaveRequest)
XPYD_MESSAGE(CacheReport, tier, stored, removed)
XPYD_MESSAGE(FetchKv, attempt, salt, begin, tokens)
XPYD_MESSAGE(KvLent, attempt, tokens, source)
XPYD_MESSAGE(FetchOver, attempt)

}  // namespace xpyd::disagg

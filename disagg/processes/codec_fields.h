// The fields of every control message, in the order in which they are sent (format: disagg/net/fields.h). A new member
// does not compile until it is listed here, and tests/disagg/codec_test.cc fails until it arrives. codec.cc sends some
// numbers as ages, by their names.
#pragma once

#include "disagg/messages.h"
#include "disagg/net/fields.h"

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

XPYD_FIELDS(SamplingParams, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
            seed, top_logprobs)
XPYD_FIELDS(TokenLogprob, token, logprob)
XPYD_FIELDS(PredictionError, n, absolute, signed_sum)
XPYD_FIELDS(Request, id, prompt, sampling, max_tokens, n, prompt_logprobs, ignore_eos, stop, stop_token_ids,
            include_stop_text, skip_special_tokens, prompt_is_text_prefix, priority, cache_salt, arrival_s, deadline_s)
XPYD_FIELDS(ChoiceState, choice, stands_for, output, logits_hash, cached_tokens, queued_s, scheduled_s, hidden_tokens,
            hidden)
XPYD_FIELDS(Sampled, chosen, top, rank, finite)
XPYD_FIELDS(TokenEvent, request_id, choice, token, text, finish, stop_text, stop_token, error, has_logprobs, sampled,
            prompt_logprobs, cached_tokens, logits_hash, queued_s, scheduled_s, time_s)
XPYD_FIELDS(KvShape, n_layers, n_kv_heads, head_dim, dtype)
XPYD_FIELDS(KvLayout, shape, order, block_tokens, n_blocks)
XPYD_FIELDS(KvShards, n_layers, n_kv_heads, tp, pp)
XPYD_FIELDS(InstanceInfo, id, name, role, layout, shards, stages, capacity_blocks, block_tokens, tier_blocks,
            max_batch, address)
XPYD_FIELDS(KvPlace, registration, blocks, slot, cached_tokens)
XPYD_FIELDS(KvHandover, blocks, tokens)
XPYD_FIELDS(OffloadStats, host_blocks, host_capacity, disk_blocks, disk_capacity, bytes_out, bytes_in, copies_out,
            copies_in, disk_bytes_written, disk_bytes_read, host_hit_tokens, disk_hit_tokens, host_evictions,
            disk_evictions, failed_writes, failed_reads, dropped_out, load_wait_seconds,
            store_seconds)
XPYD_FIELDS(VattentionStats, map_calls, unmap_calls, map_wait_seconds)
XPYD_FIELDS(KvStats, capacity, free, active, cached, in_transfer, reserved_blocks, block_tokens,
            prefix_query_tokens, prefix_hit_tokens, evictions, cow_copies, vattention, capacity_bytes, written_bytes,
            reserved_bytes, internal_bytes, idle_bytes, external_bytes, mapped_bytes, mappings, tiers)
XPYD_FIELDS(FetchStats, fetches, tokens, failed, lent, lent_tokens, expired, copies, copy_bytes, copies_dropped, ask_s)
XPYD_FIELDS(Spent, prefill_gb_s, decode_gb_s, transfer_gb_s, tflop, peak_tflops)
XPYD_FIELDS(InstanceStats, name, running, waiting, queue_remote_prefilling, queue_prefill_sending, kv, steps,
            prompt_tokens, generated_tokens, preemptions, draft_tokens, accepted_tokens, step_seconds,
            schedule_seconds, wait_seconds, transfers, transfer_bytes, transfer_descriptors, transfer_seconds,
            wire_s_per_byte, kv_refused, fetch, experts, spent, heartbeat_s, cost, cost_error)

// ---- the messages

XPYD_FIELDS(FetchOrder, holder, tokens, worth_s, limit_s)
XPYD_FIELDS(StartRequest, attempt, request, state, remote, decode, fetch)
XPYD_FIELDS(AbortAttempt, attempt)
XPYD_FIELDS(PeerJoined, info)
XPYD_FIELDS(PeerGone, id)
XPYD_FIELDS(TokenOf, attempt, index, event)
XPYD_FIELDS(AttemptProgress, attempt, stage)
XPYD_FIELDS(AttemptFailed, attempt, why)
XPYD_FIELDS(Report, stats)
XPYD_FIELDS(PrefillJob, attempt, request, state, decode)
XPYD_FIELDS(ReserveKv, attempt, request, state)
XPYD_FIELDS(KvReserved, attempt, destination)
XPYD_FIELDS(KvDelivered, attempt, choices, kv_arrived, posts, handover)
XPYD_FIELDS(ReservationCancelled, attempt)
XPYD_FIELDS(KvOffered, attempt, request, choices, source)
XPYD_FIELDS(KvTaken, attempt)
XPYD_FIELDS(KvRenewed, attempts)
XPYD_FIELDS(ClearPrefixCache)
XPYD_FIELDS(Welcome, id, name, role, lease_s, report_cache, local, order)
XPYD_FIELDS(Retire, rejoin, role)
XPYD_FIELDS(JoinRequest, role)
XPYD_FIELDS(Joined, info)
XPYD_FIELDS(LeaveRequest)
XPYD_FIELDS(CacheReport, tier, stored, removed)
XPYD_FIELDS(FetchKv, attempt, salt, begin, tokens)
XPYD_FIELDS(KvLent, attempt, tokens, source)
XPYD_FIELDS(FetchOver, attempt)
XPYD_FIELDS(CopyKv, attempt, request, holder, tokens)

}  // namespace xpyd::disagg

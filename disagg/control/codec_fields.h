// The fields of every control message, in the order in which they cross: read it as the format.
//
// Each function names all members of its struct in a structured binding, so that a new member does
// not compile until it is here; tests/disagg/codec_test.cc then fails until it is sent, too.
//
// An archive (codec.cc) writes, reads, or describes:
//   number(name, x, min, max)   of x's type, both included      real(name, x, min, max)  finite
//   bits(name, x)               any value of x's type           flag(name, x)
//   time(name, x)               Clock seconds, as an age        choice(name, e, last)    an
//   enumerator text(name, x)               UTF-8                           numbers(name, v, min) of
//   that or more list(name, v, max)          of structs (or texts)           maybe(name, optional)
//   part(name, x)               a struct                        request(name, shared Request)
// What has no limit of its own here is limited by its frame.
#pragma once

#include <climits>
#include <cstdint>

#include "allocator/block_ledger.h"
#include "disagg/messages.h"

namespace xpyd::codec {

inline constexpr int kMaxChoices = 8;  // of a request
inline constexpr int kMaxStops = 64;   // stop strings
inline constexpr int kMaxTopLogprobs = 64;
inline constexpr size_t kMaxPromptLogprobs = 1 << 20;  // tokens
inline constexpr int kMaxRanks = 1024;       // of an instance, in each direction
inline constexpr int kMaxDimension = 1 << 20;  // layers, heads
inline constexpr double kMaxSeconds = 1e12;

template <class A>
void fields(A& a, typename A::template Ref<SamplingParams> s) {
  auto& [temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
         seed, top_logprobs] = s;
  a.real("temperature", temperature, 0, 1e6);
  a.number("top_k", top_k, 0, INT_MAX);
  a.real("top_p", top_p, 0, 1);
  a.real("min_p", min_p, 0, 1);
  a.real("repetition_penalty", repetition_penalty, 0, 1e6);
  a.real("presence_penalty", presence_penalty, -1e6, 1e6);
  a.real("frequency_penalty", frequency_penalty, -1e6, 1e6);
  a.bits("seed", seed);
  a.number("top_logprobs", top_logprobs, -1, kMaxTopLogprobs);
}

template <class A>
void fields(A& a, typename A::template Ref<Request> s) {
  auto& [id, prompt, sampling, max_tokens, min_tokens, n, prompt_logprobs, ignore_eos, stop,
         stop_token_ids, include_stop_text, skip_special_tokens, prompt_is_text_prefix, priority,
         cache_salt, session_id, arrival_s, deadline_s] = s;
  a.bits("id", id);
  a.numbers("prompt", prompt, 0);
  a.part("sampling", sampling);
  a.number("max_tokens", max_tokens, 1, INT_MAX);
  a.number("min_tokens", min_tokens, 0, INT_MAX);
  a.number("n", n, 1, kMaxChoices);
  a.number("prompt_logprobs", prompt_logprobs, -1, kMaxTopLogprobs);
  a.flag("ignore_eos", ignore_eos);
  a.list("stop", stop, kMaxStops);
  a.numbers("stop_token_ids", stop_token_ids, 0);
  a.flag("include_stop_text", include_stop_text);
  a.flag("skip_special_tokens", skip_special_tokens);
  a.flag("prompt_is_text_prefix", prompt_is_text_prefix);
  a.bits("priority", priority);
  a.bits("cache_salt", cache_salt);
  a.text("session_id", session_id);
  a.time("arrival_s", arrival_s);
  a.time("deadline_s", deadline_s);
}

template <class A>
void fields(A& a, typename A::template Ref<ChoiceState> s) {
  auto& [choice, stands_for, output, logits_hash, cached_tokens, preemptions, queued_s,
         scheduled_s] = s;
  a.number("choice", choice, 0, kMaxChoices - 1);
  a.number("stands_for", stands_for, 1, kMaxChoices);
  a.numbers("output", output, 0);
  a.bits("logits_hash", logits_hash);
  a.number("cached_tokens", cached_tokens, 0, INT_MAX);
  a.number("preemptions", preemptions, 0, INT_MAX);
  a.time("queued_s", queued_s);
  a.time("scheduled_s", scheduled_s);
}

template <class A>
void fields(A& a, typename A::template Ref<TokenLogprob> s) {
  auto& [token, logprob] = s;
  a.number("token", token, 0, INT_MAX);
  a.bits("logprob", logprob);  // may be -infinity
}

template <class A>
void fields(A& a, typename A::template Ref<Sampled> s) {
  auto& [chosen, top, nan_logits, rank] = s;
  a.part("chosen", chosen);
  a.list("top", top, kMaxTopLogprobs);
  a.number("nan_logits", nan_logits, 0, INT_MAX);
  a.number("rank", rank, 0, INT_MAX);
}

template <class A>
void fields(A& a, typename A::template Ref<TokenEvent> s) {
  auto& [request_id, choice, token, text, finish, stop_text, stop_token, error, has_logprobs,
         sampled, prompt_logprobs, cached_tokens, preemptions, logits_hash, queued_s, scheduled_s,
         time_s] = s;
  a.bits("request_id", request_id);
  a.number("choice", choice, 0, kMaxChoices - 1);
  a.number("token", token, -1, INT_MAX);
  a.text("text", text);
  a.choice("finish", finish, FinishReason::error);
  a.text("stop_text", stop_text);
  a.number("stop_token", stop_token, -1, INT_MAX);
  a.text("error", error);
  a.flag("has_logprobs", has_logprobs);
  a.part("sampled", sampled);
  a.list("prompt_logprobs", prompt_logprobs, kMaxPromptLogprobs);
  a.number("cached_tokens", cached_tokens, 0, INT_MAX);
  a.number("preemptions", preemptions, 0, INT_MAX);
  a.bits("logits_hash", logits_hash);
  a.time("queued_s", queued_s);
  a.time("scheduled_s", scheduled_s);
  a.time("time_s", time_s);
}

template <class A>
void fields(A& a, typename A::template Ref<KvShape> s) {
  auto& [n_layers, n_kv_heads, head_dim, dtype] = s;
  a.number("n_layers", n_layers, 0, 1 << 12);
  a.number("n_kv_heads", n_kv_heads, 0, 1 << 12);
  a.number("head_dim", head_dim, 0, 1 << 12);
  a.choice("dtype", dtype, Dtype::int4);
}

template <class A>
void fields(A& a, typename A::template Ref<KvLayout> s) {
  auto& [shape, order, block_tokens, n_blocks] = s;
  a.part("shape", shape);
  a.choice("order", order, KvOrder::token_major);
  a.number("block_tokens", block_tokens, 0, INT_MAX);
  a.number("n_blocks", n_blocks, 0, INT_MAX);
}

template <class A>
void fields(A& a, typename A::template Ref<KvShards> s) {
  auto& [n_layers, n_kv_heads, tp, pp, long_stage, stage_layers] = s;
  a.number("n_layers", n_layers, 0, kMaxDimension);
  a.number("n_kv_heads", n_kv_heads, 0, kMaxDimension);
  a.number("tp", tp, 1, kMaxRanks);
  a.number("pp", pp, 1, kMaxRanks);
  a.number("long_stage", long_stage, -1, kMaxRanks);
  a.numbers("stage_layers", stage_layers, 0);
}

template <class A>
void fields(A& a, typename A::template Ref<InstanceInfo> s) {
  auto& [id, name, role, layout, shards, capacity_blocks, block_tokens, max_batch, address,
         control] = s;
  a.number("id", id, kConductor, INT_MAX);
  a.text("name", name);
  a.choice("role", role, Role::colocated);
  a.part("layout", layout);
  a.part("shards", shards);
  a.number("capacity_blocks", capacity_blocks, 0, INT_MAX);
  a.number("block_tokens", block_tokens, 0, INT_MAX);
  a.number("max_batch", max_batch, 0, INT_MAX);
  a.text("address", address);
  a.text("control", control);
}

template <class A>
void fields(A& a, typename A::template Ref<WindowKey> s) {
  auto& [index, generation, secret] = s;
  a.bits("index", index);
  a.bits("generation", generation);
  a.bits("secret", secret);
}

template <class A>
void fields(A& a, typename A::template Ref<KvPlace> s) {
  auto& [window, blocks, slot, cached_tokens, checksums] = s;
  a.part("window", window);
  a.numbers("blocks", blocks, 0);
  a.number("slot", slot, 0, INT_MAX);
  a.number("cached_tokens", cached_tokens, 0, INT_MAX);
  a.numbers("checksums", checksums);
}

template <class A>
void fields(A& a, typename A::template Ref<KvHandover> s) {
  auto& [blocks, tokens, generations, giver] = s;
  a.numbers("blocks", blocks, 0);
  a.number("tokens", tokens, 0, INT_MAX);
  a.numbers("generations", generations);
  a.number("giver", giver, 0, BlockLedger::kMembers - 1);  // -1 stays in its process
}

template <class A>
void fields(A& a, typename A::template Ref<KvTierStats> s) {
  auto& [host_blocks, host_capacity, disk_blocks, disk_capacity, bytes_out, bytes_in, copies_out,
         copies_in, disk_bytes_written, disk_bytes_read, host_hit_tokens, disk_hit_tokens,
         host_evictions, disk_evictions, failed_writes, failed_reads, corrupt_reads, dropped_out,
         load_wait_seconds] = s;
  a.bits("host_blocks", host_blocks);
  a.bits("host_capacity", host_capacity);
  a.bits("disk_blocks", disk_blocks);
  a.bits("disk_capacity", disk_capacity);
  a.bits("bytes_out", bytes_out);
  a.bits("bytes_in", bytes_in);
  a.bits("copies_out", copies_out);
  a.bits("copies_in", copies_in);
  a.bits("disk_bytes_written", disk_bytes_written);
  a.bits("disk_bytes_read", disk_bytes_read);
  a.bits("host_hit_tokens", host_hit_tokens);
  a.bits("disk_hit_tokens", disk_hit_tokens);
  a.bits("host_evictions", host_evictions);
  a.bits("disk_evictions", disk_evictions);
  a.bits("failed_writes", failed_writes);
  a.bits("failed_reads", failed_reads);
  a.bits("corrupt_reads", corrupt_reads);
  a.bits("dropped_out", dropped_out);
  a.real("load_wait_seconds", load_wait_seconds, 0, kMaxSeconds);
}

template <class A>
void fields(A& a, typename A::template Ref<KvStats> s) {
  auto& [capacity, free, active, cached, in_transfer, elsewhere, block_tokens, prefix_query_tokens,
         prefix_hit_tokens, evictions, cow_copies, map_calls, unmap_calls, waited_jobs,
         map_wait_seconds, capacity_bytes, written_bytes, reserved_bytes, internal_bytes,
         idle_bytes, external_bytes, mapped_bytes, mappings, tiers] = s;
  a.number("capacity", capacity, 0, INT_MAX);
  a.number("free", free, 0, INT_MAX);
  a.number("active", active, 0, INT_MAX);
  a.number("cached", cached, 0, INT_MAX);
  a.number("in_transfer", in_transfer, 0, INT_MAX);
  a.number("elsewhere", elsewhere, 0, INT_MAX);
  a.number("block_tokens", block_tokens, 0, INT_MAX);
  a.bits("prefix_query_tokens", prefix_query_tokens);
  a.bits("prefix_hit_tokens", prefix_hit_tokens);
  a.bits("evictions", evictions);
  a.bits("cow_copies", cow_copies);
  a.bits("map_calls", map_calls);
  a.bits("unmap_calls", unmap_calls);
  a.bits("waited_jobs", waited_jobs);
  a.real("map_wait_seconds", map_wait_seconds, 0, kMaxSeconds);
  a.bits("capacity_bytes", capacity_bytes);
  a.bits("written_bytes", written_bytes);
  a.bits("reserved_bytes", reserved_bytes);
  a.bits("internal_bytes", internal_bytes);
  a.bits("idle_bytes", idle_bytes);
  a.bits("external_bytes", external_bytes);
  a.bits("mapped_bytes", mapped_bytes);
  a.bits("mappings", mappings);
  a.part("tiers", tiers);
}

template <class A>
void fields(A& a, typename A::template Ref<InstanceStats> s) {
  auto& [name, running, waiting, queue_remote_prefilling, queue_prefill_sending, kv, steps,
         prompt_tokens, generated_tokens, preemptions, step_seconds, schedule_seconds, wait_seconds,
         transfer_bytes, transfer_descriptors, transfers, transfer_seconds, wire_s_per_byte,
         kv_refused, leases_expired, heartbeat_s] = s;
  a.text("name", name);
  a.number("running", running, 0, INT_MAX);
  a.number("waiting", waiting, 0, INT_MAX);
  a.number("queue_remote_prefilling", queue_remote_prefilling, 0, INT_MAX);
  a.number("queue_prefill_sending", queue_prefill_sending, 0, INT_MAX);
  a.part("kv", kv);
  a.bits("steps", steps);
  a.bits("prompt_tokens", prompt_tokens);
  a.bits("generated_tokens", generated_tokens);
  a.bits("preemptions", preemptions);
  a.real("step_seconds", step_seconds, 0, kMaxSeconds);
  a.real("schedule_seconds", schedule_seconds, 0, kMaxSeconds);
  a.real("wait_seconds", wait_seconds, 0, kMaxSeconds);
  a.bits("transfer_bytes", transfer_bytes);
  a.bits("transfer_descriptors", transfer_descriptors);
  a.bits("transfers", transfers);
  a.real("transfer_seconds", transfer_seconds, 0, kMaxSeconds);
  a.real("wire_s_per_byte", wire_s_per_byte, 0, kMaxSeconds);
  a.bits("kv_refused", kv_refused);
  a.bits("leases_expired", leases_expired);
  a.time("heartbeat_s", heartbeat_s);
}

// ---- the messages

template <class A>
void fields(A& a, typename A::template Ref<StartRequest> s) {
  auto& [attempt, request, state, order, decode] = s;
  a.bits("attempt", attempt);
  a.request("request", request);
  a.part("state", state);
  a.choice("order", order, DisaggOrder::decode_first);
  a.number("decode", decode, kConductor, INT_MAX);
}

template <class A>
void fields(A& a, typename A::template Ref<AbortAttempt> s) {
  auto& [attempt] = s;
  a.bits("attempt", attempt);
}

template <class A>
void fields(A& a, typename A::template Ref<PeerJoined> s) {
  auto& [info] = s;
  a.part("info", info);
}

template <class A>
void fields(A& a, typename A::template Ref<PeerGone> s) {
  auto& [id] = s;
  a.number("id", id, kConductor, INT_MAX);
}

template <class A>
void fields(A& a, typename A::template Ref<TokenOf> s) {
  auto& [attempt, index, event] = s;
  a.bits("attempt", attempt);
  a.number("index", index, 0, INT_MAX);
  a.part("event", event);
}

template <class A>
void fields(A& a, typename A::template Ref<AttemptProgress> s) {
  auto& [attempt, stage] = s;
  a.bits("attempt", attempt);
  a.choice("stage", stage, AttemptProgress::prompt_done);
}

template <class A>
void fields(A& a, typename A::template Ref<AttemptFailed> s) {
  auto& [attempt, reason, why] = s;
  a.bits("attempt", attempt);
  a.choice("reason", reason, AttemptFailure::refused);
  a.text("why", why);
}

template <class A>
void fields(A& a, typename A::template Ref<Report> s) {
  auto& [stats] = s;
  a.part("stats", stats);
}

template <class A>
void fields(A& a, typename A::template Ref<PrefillJob> s) {
  auto& [attempt, request, state, decode] = s;
  a.bits("attempt", attempt);
  a.request("request", request);
  a.part("state", state);
  a.number("decode", decode, kConductor, INT_MAX);
}

template <class A>
void fields(A& a, typename A::template Ref<ReserveKv> s) {
  auto& [attempt, request, state] = s;
  a.bits("attempt", attempt);
  a.request("request", request);
  a.part("state", state);
}

template <class A>
void fields(A& a, typename A::template Ref<KvReserved> s) {
  auto& [attempt, destination] = s;
  a.bits("attempt", attempt);
  a.part("destination", destination);
}

template <class A>
void fields(A& a, typename A::template Ref<KvDelivered> s) {
  auto& [attempt, choices, kv_arrived, posts, checksums, handover] = s;
  a.bits("attempt", attempt);
  a.list("choices", choices, kMaxChoices);
  a.flag("kv_arrived", kv_arrived);
  a.number("posts", posts, 0, INT_MAX);
  a.numbers("checksums", checksums);
  a.maybe("handover", handover);
}

template <class A>
void fields(A& a, typename A::template Ref<ReservationCancelled> s) {
  auto& [attempt] = s;
  a.bits("attempt", attempt);
}

template <class A>
void fields(A& a, typename A::template Ref<KvOffered> s) {
  auto& [attempt, request, choices, source] = s;
  a.bits("attempt", attempt);
  a.request("request", request);
  a.list("choices", choices, kMaxChoices);
  a.part("source", source);
}

template <class A>
void fields(A& a, typename A::template Ref<KvTaken> s) {
  auto& [attempt] = s;
  a.bits("attempt", attempt);
}

template <class A>
void fields(A& a, typename A::template Ref<KvRenewed> s) {
  auto& [attempts] = s;
  a.numbers("attempts", attempts);
}

template <class A>
void fields(A& a, typename A::template Ref<PeerBroken> s) {
  auto& [id] = s;
  a.number("id", id, kConductor, INT_MAX);
}

template <class A>
void fields(A&, typename A::template Ref<ClearPrefixCache>) {}

template <class A>
void fields(A& a, typename A::template Ref<Welcome> s) {
  auto& [id, name, role, lease_s, pool, report_cache] = s;
  a.number("id", id, 0, INT_MAX);
  a.text("name", name);
  a.choice("role", role, Role::colocated);
  a.real("lease_s", lease_s, 0, kMaxSeconds);
  a.text("pool", pool);
  a.flag("report_cache", report_cache);
}

template <class A>
void fields(A& a, typename A::template Ref<Retire> s) {
  auto& [rejoin, role] = s;
  a.flag("rejoin", rejoin);
  a.choice("role", role, Role::colocated);
}

template <class A>
void fields(A& a, typename A::template Ref<JoinRequest> s) {
  auto& [role] = s;
  a.choice("role", role, Role::colocated);
}

template <class A>
void fields(A& a, typename A::template Ref<Joined> s) {
  auto& [info] = s;
  a.part("info", info);
}

template <class A>
void fields(A&, typename A::template Ref<LeaveRequest>) {}

template <class A>
void fields(A& a, typename A::template Ref<CacheReport> s) {
  auto& [stored, removed] = s;
  a.numbers("stored", stored);
  a.numbers("removed", removed);
}

}  // namespace xpyd::codec

// The fields of every control message, in the order in which they cross: read it as the format (disagg/net/fields.h
// says how). A new member does not compile until it is here; tests/disagg/codec_test.cc then fails until it is sent,
// too.
//
// To the archives of fields.h codec.cc adds:
//   number(name, x, Number), numbers(name, v, Number)   ranges.h has the table
//   time(name, x): Clock seconds, as an age             request(name, shared Request)
// and XPYD_EACH(a, Number, x, y, …) is number() of each.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "disagg/control/ranges.h"
#include "disagg/messages.h"
#include "disagg/net/fields.h"

namespace xpyd::disagg::codec {

inline constexpr int kMaxStops = 64;  // stop strings
inline constexpr int kMaxTopLogprobs = 64;
inline constexpr size_t kMaxPromptLogprobs = 1 << 20;  // tokens
inline constexpr double kMaxSeconds = 1e12;

#define XPYD_EACH(a, range, ...) codec::each(a, range, #__VA_ARGS__, __VA_ARGS__)

template <class A, class... T>
void each(A& a, Number range, std::string_view names, T&... values) {
  const auto one = [&](auto& value) {
    const size_t end = std::min(names.find(", "), names.size());
    a.number(std::string(names.substr(0, end)).c_str(), value, range);
    names.remove_prefix(std::min(end + 2, names.size()));
  };
  (one(values), ...);
}

}  // namespace xpyd::disagg::codec

namespace xpyd::disagg {

template <class A>
void fields(A& a, typename A::template Ref<SamplingParams> s) {
  auto& [temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed,
         top_logprobs] = s;
  a.real("temperature", temperature, 0, 1e6);
  a.number("top_k", top_k, Number::natural);
  a.real("top_p", top_p, 0, 1);
  a.real("min_p", min_p, 0, 1);
  a.real("repetition_penalty", repetition_penalty, 0, 1e6);
  a.real("presence_penalty", presence_penalty, -1e6, 1e6);
  a.real("frequency_penalty", frequency_penalty, -1e6, 1e6);
  a.bits("seed", seed);
  a.number("top_logprobs", top_logprobs, Number::top_logprobs);
}

template <class A>
void fields(A& a, typename A::template Ref<Request> s) {
  auto& [id, prompt, sampling, max_tokens, min_tokens, n, prompt_logprobs, ignore_eos, stop, stop_token_ids,
         include_stop_text, skip_special_tokens, prompt_is_text_prefix, priority, cache_salt, session_id, arrival_s,
         deadline_s] = s;
  a.bits("id", id);
  a.numbers("prompt", prompt, Number::token);
  a.part("sampling", sampling);
  a.number("max_tokens", max_tokens, Number::tokens_some);
  a.number("min_tokens", min_tokens, Number::tokens);
  a.number("n", n, Number::choices);
  a.number("prompt_logprobs", prompt_logprobs, Number::top_logprobs);
  a.flag("ignore_eos", ignore_eos);
  a.list("stop", stop, codec::kMaxStops);
  a.numbers("stop_token_ids", stop_token_ids, Number::token);
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
  auto& [choice, stands_for, output, logits_hash, cached_tokens, preemptions, queued_s, scheduled_s] = s;
  a.number("choice", choice, Number::choice);
  a.number("stands_for", stands_for, Number::choices);
  a.numbers("output", output, Number::token);
  a.bits("logits_hash", logits_hash);
  a.number("cached_tokens", cached_tokens, Number::tokens);
  a.number("preemptions", preemptions, Number::count);
  a.time("queued_s", queued_s);
  a.time("scheduled_s", scheduled_s);
}

template <class A>
void fields(A& a, typename A::template Ref<TokenLogprob> s) {
  auto& [token, logprob] = s;
  a.number("token", token, Number::token);
  a.bits("logprob", logprob);  // may be -infinity
}

template <class A>
void fields(A& a, typename A::template Ref<Sampled> s) {
  auto& [chosen, top, nan_logits, rank] = s;
  a.part("chosen", chosen);
  a.list("top", top, codec::kMaxTopLogprobs);
  a.number("nan_logits", nan_logits, Number::natural);
  a.number("rank", rank, Number::natural);
}

template <class A>
void fields(A& a, typename A::template Ref<TokenEvent> s) {
  auto& [request_id, choice, token, text, finish, stop_text, stop_token, error, has_logprobs, sampled, prompt_logprobs,
         cached_tokens, preemptions, logits_hash, queued_s, scheduled_s, time_s] = s;
  a.bits("request_id", request_id);
  a.number("choice", choice, Number::choice);
  a.number("token", token, Number::token_or_none);
  a.text("text", text);
  a.choice("finish", finish, FinishReason::error);
  a.text("stop_text", stop_text);
  a.number("stop_token", stop_token, Number::token_or_none);
  a.text("error", error);
  a.flag("has_logprobs", has_logprobs);
  a.part("sampled", sampled);
  a.list("prompt_logprobs", prompt_logprobs, codec::kMaxPromptLogprobs);
  a.number("cached_tokens", cached_tokens, Number::tokens);
  a.number("preemptions", preemptions, Number::count);
  a.bits("logits_hash", logits_hash);
  a.time("queued_s", queued_s);
  a.time("scheduled_s", scheduled_s);
  a.time("time_s", time_s);
}

template <class A>
void fields(A& a, typename A::template Ref<KvShape> s) {
  auto& [n_layers, n_kv_heads, head_dim, dtype] = s;
  a.number("n_layers", n_layers, Number::layers);
  a.number("n_kv_heads", n_kv_heads, Number::heads);
  a.number("head_dim", head_dim, Number::head_dim);
  a.choice("dtype", dtype, Dtype::int4);
}

template <class A>
void fields(A& a, typename A::template Ref<KvLayout> s) {
  auto& [shape, order, block_tokens, n_blocks] = s;
  a.part("shape", shape);
  a.choice("order", order, KvOrder::token_major);
  a.number("block_tokens", block_tokens, Number::count);
  a.number("n_blocks", n_blocks, Number::count);
}

template <class A>
void fields(A& a, typename A::template Ref<KvShards> s) {
  auto& [n_layers, n_kv_heads, tp, pp, long_stage, stage_layers] = s;
  a.number("n_layers", n_layers, Number::layers);
  a.number("n_kv_heads", n_kv_heads, Number::heads);
  a.number("tp", tp, Number::ranks);
  a.number("pp", pp, Number::ranks);
  a.number("long_stage", long_stage, Number::stage);
  a.numbers("stage_layers", stage_layers, Number::layers);
}

template <class A>
void fields(A& a, typename A::template Ref<InstanceInfo> s) {
  auto& [id, name, role, layout, shards, capacity_blocks, block_tokens, max_batch, address, control] = s;
  a.number("id", id, Number::instance);
  a.text("name", name);
  a.choice("role", role, Role::colocated);
  a.part("layout", layout);
  a.part("shards", shards);
  XPYD_EACH(a, Number::count, capacity_blocks, block_tokens, max_batch);
  a.text("address", address);
  a.text("control", control);
}

template <class A>
void fields(A& a, typename A::template Ref<KvPlace> s) {
  auto& [window, blocks, slot, cached_tokens, checksums] = s;
  a.part("window", window);
  a.numbers("blocks", blocks, Number::block);
  a.number("slot", slot, Number::block);
  a.number("cached_tokens", cached_tokens, Number::tokens);
  a.numbers("checksums", checksums);
}

template <class A>
void fields(A& a, typename A::template Ref<KvHandover> s) {
  auto& [blocks, tokens, generations, giver] = s;
  a.numbers("blocks", blocks, Number::block);
  a.number("tokens", tokens, Number::tokens);
  a.numbers("generations", generations);
  a.number("giver", giver, Number::member);  // -1 stays in its process
}

template <class A>
void fields(A& a, typename A::template Ref<KvTierStats> s) {
  auto& [host_blocks, host_capacity, disk_blocks, disk_capacity, bytes_out, bytes_in, copies_out, copies_in,
         disk_bytes_written, disk_bytes_read, host_hit_tokens, disk_hit_tokens, host_evictions, disk_evictions,
         failed_writes, failed_reads, corrupt_reads, dropped_out, load_wait_seconds] = s;
  XPYD_EACH(a, Number::total, host_blocks, host_capacity, disk_blocks, disk_capacity, bytes_out, bytes_in, copies_out,
            copies_in, disk_bytes_written, disk_bytes_read, host_hit_tokens, disk_hit_tokens, host_evictions,
            disk_evictions, failed_writes, failed_reads, corrupt_reads, dropped_out);
  a.real("load_wait_seconds", load_wait_seconds, 0, codec::kMaxSeconds);
}

template <class A>
void fields(A& a, typename A::template Ref<VattentionStats> s) {
  auto& [map_calls, unmap_calls, waited_jobs, map_wait_seconds] = s;
  XPYD_EACH(a, Number::total, map_calls, unmap_calls, waited_jobs);
  a.real("map_wait_seconds", map_wait_seconds, 0, codec::kMaxSeconds);
}

template <class A>
void fields(A& a, typename A::template Ref<KvStats> s) {
  auto& [capacity, free, active, cached, in_transfer, elsewhere, block_tokens, prefix_query_tokens, prefix_hit_tokens,
         evictions, cow_copies, vattention, capacity_bytes, written_bytes, reserved_bytes, internal_bytes, idle_bytes,
         external_bytes, mapped_bytes, mappings, tiers] = s;
  XPYD_EACH(a, Number::count, capacity, free, active, cached, in_transfer, elsewhere, block_tokens);
  XPYD_EACH(a, Number::total, prefix_query_tokens, prefix_hit_tokens, evictions, cow_copies);
  a.part("vattention", vattention);
  XPYD_EACH(a, Number::total, capacity_bytes, written_bytes, reserved_bytes, internal_bytes, idle_bytes, external_bytes,
            mapped_bytes, mappings);
  a.part("tiers", tiers);
}

template <class A>
void fields(A& a, typename A::template Ref<InstanceStats> s) {
  auto& [name, running, waiting, queue_remote_prefilling, queue_prefill_sending, kv, steps, prompt_tokens,
         generated_tokens, preemptions, step_seconds, schedule_seconds, wait_seconds, transfer_bytes,
         transfer_descriptors, transfers, transfer_seconds, wire_s_per_byte, kv_refused, leases_expired,
         heartbeat_s] = s;
  a.text("name", name);
  XPYD_EACH(a, Number::count, running, waiting, queue_remote_prefilling, queue_prefill_sending);
  a.part("kv", kv);
  XPYD_EACH(a, Number::total, steps, prompt_tokens, generated_tokens, preemptions);
  a.real("step_seconds", step_seconds, 0, codec::kMaxSeconds);
  a.real("schedule_seconds", schedule_seconds, 0, codec::kMaxSeconds);
  a.real("wait_seconds", wait_seconds, 0, codec::kMaxSeconds);
  XPYD_EACH(a, Number::total, transfer_bytes, transfer_descriptors, transfers);
  a.real("transfer_seconds", transfer_seconds, 0, codec::kMaxSeconds);
  a.real("wire_s_per_byte", wire_s_per_byte, 0, codec::kMaxSeconds);
  a.number("kv_refused", kv_refused, Number::total);
  a.number("leases_expired", leases_expired, Number::total);
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
  a.number("decode", decode, Number::instance_or_none);
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
  a.number("id", id, Number::instance);
}

template <class A>
void fields(A& a, typename A::template Ref<TokenOf> s) {
  auto& [attempt, index, event] = s;
  a.bits("attempt", attempt);
  a.number("index", index, Number::tokens);
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
  a.number("decode", decode, Number::instance_or_none);
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
  a.number("posts", posts, Number::post);
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
  a.number("id", id, Number::instance);
}

template <class A>
void fields(A&, typename A::template Ref<ClearPrefixCache>) {}

template <class A>
void fields(A& a, typename A::template Ref<Welcome> s) {
  auto& [id, name, role, lease_s, pool, report_cache, local] = s;
  a.number("id", id, Number::instance);
  a.text("name", name);
  a.choice("role", role, Role::colocated);
  a.real("lease_s", lease_s, 0, codec::kMaxSeconds);
  a.text("pool", pool);
  a.flag("report_cache", report_cache);
  a.flag("local", local);
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

}  // namespace xpyd::disagg

// What policies see and what they answer, as columns of the event log (event_log.h): a decision that is written so can
// be taken again by any build (disagg/replay.h).
//
// Thread safety: plain functions.
#pragma once

#include "allocator/eviction.h"
#include "base/json_columns.h"
#include "batch/admission.h"
#include "batch/policy.h"
#include "disagg/admission.h"
#include "disagg/order.h"
#include "disagg/placement.h"
#include "disagg/roles.h"

namespace xpyd::allocator {

template <class A>
void columns(A& a, Like<A, BlockUse>& s) {
  a("last_use", s.last_use), a("uses", s.uses), a("position", s.position);
}

}  // namespace xpyd::allocator

namespace xpyd::batch {

template <class A>
void columns(A& a, Like<A, SequenceView>& s) {
  a("n_tokens", s.n_tokens), a("n_computed", s.n_computed), a("n_limit", s.n_limit), a("n_blocks", s.n_blocks);
  a("choices", s.choices), a("tail_shared", s.tail_shared), a("n_output", s.n_output);
  a("n_shared_blocks", s.n_shared_blocks);
}
// Without `admission`, which is a row's name beside it.
template <class A>
void columns(A& a, Like<A, BatchView>& s) {
  a("running", s.running), a("waiting", s.waiting), a("available_blocks", s.available_blocks);
  a("capacity_blocks", s.capacity_blocks), a("block_tokens", s.block_tokens), a("max_batch", s.max_batch);
  a("step_tokens", s.step_tokens);
}
template <class A>
void columns(A& a, Like<A, ScheduledRun>& s) {
  a("index", s.index), a("n_tokens", s.n_tokens);
}
template <class A>
void columns(A& a, Like<A, BatchPlan>& s) {
  a("runs", s.runs), a("admits", s.admits), a("preempts", s.preempts);
}

}  // namespace xpyd::batch

namespace xpyd::disagg {

template <class A>
void columns(A& a, Like<A, InstanceView>& s) {
  a("role", s.role), a("queued", s.queued), a("queued_tokens", s.queued_tokens), a("sequences", s.sequences);
  a("context_tokens", s.context_tokens), a("available_tokens", s.available_tokens);
  a("capacity_tokens", s.capacity_tokens), a("indexed_tokens", s.indexed_tokens), a("recent_tokens", s.recent_tokens);
  a("cached_tokens", s.cached_tokens), a("host_tokens", s.host_tokens), a("disk_tokens", s.disk_tokens);
  a("queue_s", s.queue_s), a("prefill_s", s.prefill_s), a("fetch_s", s.fetch_s);
  a("fetched_prefill_s", s.fetched_prefill_s), a("step_s", s.step_s), a("step_with_s", s.step_with_s);
}
template <class A>
void columns(A& a, Like<A, Objectives>& s) {
  a("ttft_s", s.ttft_s), a("tbt_s", s.tbt_s);
}
template <class A>
void columns(A& a, Like<A, ClusterView>& s) {
  a("instances", s.instances), a("prompt_tokens", s.prompt_tokens), a("block_tokens", s.block_tokens);
  a("objectives", s.objectives), a("number", s.number), a("random", s.random);
}
template <class A>
void columns(A& a, Like<A, PlacementOptions>& s) {
  a("fetch_threshold", s.fetch_threshold);
}
template <class A>
void columns(A& a, Like<A, Placement>& s) {
  a("prefill", s.prefill), a("decode", s.decode), a("source", s.source);
}

template <class A>
void columns(A& a, Like<A, DecodeView>& s) {
  a("joins_s", s.joins_s), a("ends_s", s.ends_s), a("context", s.context), a("at_longest", s.at_longest);
}
template <class A>
void columns(A& a, Like<A, AdmissionOptions>& s) {
  a("decode", s.decode), a("fixed_s", s.fixed_s), a("quantile", s.quantile), a("factor", s.factor);
}
// Without `cost`, whose terms are beside it.
template <class A>
void columns(A& a, Like<A, ClusterAdmission>& s) {
  a("now_s", s.now_s), a("ttft_s", s.ttft_s), a("objectives", s.objectives), a("prompt_tokens", s.prompt_tokens);
  a("max_tokens", s.max_tokens), a("decoding", s.decoding), a("coming", s.coming);
  a("capacity_tokens", s.capacity_tokens), a("mean_s", s.mean_s), a("quantile_s", s.quantile_s);
  a("instances", s.instances), a("sheddable", s.sheddable), a("random", s.random);
}
template <class A>
void columns(A& a, Like<A, Refusal>& s) {
  a("why", s.why), a("predicted", s.predicted), a("objective", s.objective), a("retry_s", s.retry_s);
}

template <class A>
void columns(A& a, Like<A, DisaggOptions>& s) {
  a("pull", s.pull), a("max_local_prefill_tokens", s.max_local_prefill_tokens);
  a("max_prefill_queue", s.max_prefill_queue), a("min_remote_tokens", s.min_remote_tokens);
  a("min_remote_ratio", s.min_remote_ratio), a("max_prefill_queued_tokens", s.max_prefill_queued_tokens);
  a("first_generation", s.first_generation);
}
template <class A>
void columns(A& a, Like<A, DisaggView>& s) {
  a("tokens", s.tokens), a("cached_decode", s.cached_decode), a("cached_prefill", s.cached_prefill);
  a("prefill_jobs", s.prefill_jobs), a("prefill_queued_tokens", s.prefill_queued_tokens);
  a("decode_queued_tokens", s.decode_queued_tokens), a("decode_sequences", s.decode_sequences);
  a("prefill_s_per_token", s.prefill_s_per_token), a("decode_s_per_token", s.decode_s_per_token);
  a("step_s", s.step_s), a("kv_s_per_token", s.kv_s_per_token), a("overlap", s.overlap);
  a("chunk_tokens", s.chunk_tokens);
}

template <class A>
void columns(A& a, Like<A, RolesOptions>& s) {
  a("pressure", s.pressure), a("band", s.band), a("cool_down_s", s.cool_down_s), a("at_least", s.at_least);
}
template <class A>
void columns(A& a, Like<A, RolesView>& s) {
  a("now_s", s.now_s), a("changed_s", s.changed_s), a("prefill", s.prefill), a("decode", s.decode);
  a("prompt_tokens_s", s.prompt_tokens_s), a("output_tokens_s", s.output_tokens_s);
  a("prefill_velocity", s.prefill_velocity), a("decode_velocity", s.decode_velocity);
}

}  // namespace xpyd::disagg

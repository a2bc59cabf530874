// The views and answers of policies as columns of the event log (event_log.h). Any build can take a logged decision
// again (experiments/event_log/replay.h).
//
// Thread safety: plain functions.
#pragma once

#include "allocator/eviction.h"
#include "base/json/json_columns.h"
#include "batch/policies/policy.h"
#include "disagg/conductor/admission.h"
#include "disagg/conductor/order.h"
#include "disagg/conductor/placement.h"
#include "disagg/pool/fetch_policy.h"
#include "disagg/pool/replication.h"

namespace xpyd::allocator {

XPYD_COLUMNS(BlockUse, last_use, uses, position, entered)

}  // namespace xpyd::allocator

namespace xpyd::batch {

XPYD_COLUMNS(SequenceView, n_tokens, n_computed, n_limit, n_blocks, choices, tail_shared, n_output, n_held)
// Without `admission`: the log has the name of its row beside the view.
XPYD_COLUMNS(BatchView, running, waiting, available_blocks, capacity_blocks, block_tokens, max_batch, step_tokens)
XPYD_COLUMNS(ScheduledRun, index, n_tokens)
XPYD_COLUMNS(BatchPlan, runs, admits, preempts)

}  // namespace xpyd::batch

namespace xpyd::disagg {

XPYD_COLUMNS(InstanceView, role, queued, queued_tokens, sequences, context_tokens, available_tokens, capacity_tokens,
             indexed_tokens, recent_tokens, cached_tokens, host_tokens, disk_tokens, queue_s, prefill_s, fetch_s,
             fetched_prefill_s, step_s, step_with_s)
XPYD_COLUMNS(Objectives, ttft_s, tbt_s)
XPYD_COLUMNS(ClusterView, instances, prompt_tokens, block_tokens, objectives, number, random)
XPYD_COLUMNS(PlacementOptions, fetch_threshold)
XPYD_COLUMNS(Placement, prefill, decode, source)

XPYD_COLUMNS(FetchView, prompt_tokens, cached_tokens, holder_tokens, bytes_s, handshake_s, queue_s, saved_s)
XPYD_COLUMNS(ReplicationView, reads_s, replicas)

XPYD_COLUMNS(DecodeView, joins_s, ends_s, context, at_longest)
XPYD_COLUMNS(AdmissionOptions, decode, fixed_s, quantile, factor)
// Without `cost`: the log has its terms beside the view.
XPYD_COLUMNS(ClusterAdmission, now_s, ttft_s, queue_s, idle, objectives, prompt_tokens, max_tokens, decoding, coming,
             capacity_tokens, mean_s, quantile_s, instances, sheddable, random)
XPYD_COLUMNS(Refusal, why, predicted, objective, retry_s)

XPYD_COLUMNS(DisaggOptions, pull, max_local_prefill_tokens, max_prefill_queue, min_remote_tokens, min_remote_ratio,
             max_prefill_queued_tokens, first_generation, append_tbt_weight)
XPYD_COLUMNS(DisaggView, tokens, cached_decode, cached_prefill, prefill_jobs, prefill_queued_tokens,
             decode_queued_tokens, decode_sequences, prefill_s_per_token, decode_s_per_token, step_s, kv_s_per_token,
             overlap, chunk_tokens, decode_life_s)

}  // namespace xpyd::disagg

// The views and answers of policies as columns of the event log (event_log.h). Any build can take a logged decision
// again (experiments/event_log/replay.h).
//
// Thread safety: plain functions.
#pragma once

#include "allocator/eviction.h"
#include "base/json/json_columns.h"
#include "batch/policies/policy.h"
#include "disagg/conductor/admission.h"
#include "disagg/conductor/placement.h"
#include "disagg/pool/fetch_policy.h"

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
             indexed_tokens, cached_tokens, host_tokens, disk_tokens, queue_s, prefill_s, fetch_s, fetched_prefill_s,
             step_s, step_with_s)
XPYD_COLUMNS(Objectives, ttft_s, tbt_s)
XPYD_COLUMNS(ClusterView, instances, prompt_tokens, block_tokens, objectives, number, random)
XPYD_COLUMNS(PlacementOptions, fetch_threshold)
XPYD_COLUMNS(Placement, prefill, decode, source)

XPYD_COLUMNS(FetchView, prompt_tokens, cached_tokens, holder_tokens, bytes_s, handshake_s, saved_s)

XPYD_COLUMNS(DecodeView, joins_s, context, at_longest)
XPYD_COLUMNS(AdmissionOptions, factor)
// Without `cost`: the log has its terms beside the view.
XPYD_COLUMNS(ClusterAdmission, now_s, ttft_s, idle, objectives, prompt_tokens, max_tokens, decoding, coming,
             capacity_tokens, mean_s)
XPYD_COLUMNS(Refusal, why, predicted, objective)

XPYD_COLUMNS(DisaggOptions, pull, max_local_prefill_tokens, max_prefill_queue)
XPYD_COLUMNS(DisaggView, tokens, cached_decode, prefill_jobs, joined_step_s, tbt_s)

}  // namespace xpyd::disagg

#include <algorithm>
#include <bit>
#include <cstring>

#include "model/plan_cuda.h"

namespace xpyd {
namespace {

constexpr size_t kSamplingInts = sizeof(Draw) / sizeof(int32_t);
static_assert(sizeof(Draw) % sizeof(int32_t) == 0 &&
              alignof(Draw) == alignof(int32_t));
constexpr int kMinGraphKv = 256;  // tokens: the smallest upper bound of a captured step's sequences

Plan plan_of(const StepInput& step) {
  Plan plan;
  plan.pool = step.views[0].pool;
  plan.layout = *step.views[0].layout;
  return plan;
}

}  // namespace

void OrderedStep::take(const StepInput& step, bool sort) {
  const int n_seqs = int(step.kv_lengths.size());
  token_ids.clear();
  q_offsets.assign(1, 0);
  kv_lengths.clear();
  views.clear();
  logit_rows.clear();
  logit_order.assign(step.logit_rows.size(), 0);
  n_decode = 0;
  for (int pass = 0; pass < (sort ? 2 : 1); ++pass) {
    size_t next = 0;  // of step.logit_rows
    for (int s = 0; s < n_seqs; ++s) {
      const int begin = step.q_offsets[size_t(s)], end = step.q_offsets[size_t(s) + 1];
      const bool mine = !sort || (end - begin == 1) == (pass == 0);
      const int moved = int(token_ids.size()) - begin;
      for (; next < step.logit_rows.size() && step.logit_rows[next] < end; ++next) {
        if (!mine) continue;
        logit_order[next] = int32_t(logit_rows.size());
        logit_rows.push_back(step.logit_rows[next] + moved);
      }
      if (!mine) continue;
      token_ids.insert(token_ids.end(), step.token_ids.begin() + begin,
                       step.token_ids.begin() + end);
      q_offsets.push_back(int32_t(token_ids.size()));
      kv_lengths.push_back(step.kv_lengths[size_t(s)]);
      views.push_back(step.views[size_t(s)]);
      n_decode += sort && pass == 0;
    }
  }
}

size_t StepPlanner::max_ints(const CudaModelOptions& o) {
  const size_t rows = size_t(o.max_step_tokens), seqs = size_t(o.max_seqs);
  // Four sets of sequences: all, those with several tokens, and the same two of the wanted rows.
  const size_t set = 2 * rows + 2 * seqs + 1 + seqs * size_t(o.max_table_entries);
  return 2 * rows + 4 * set + size_t(o.max_logits) * (1 + kSamplingInts);
}

void StepPlanner::allocate(const CudaModelOptions& o, int32_t* device, size_t max_ints) {
  max_kv_length_ = o.max_kv_length;
  max_table_entries_ = o.max_table_entries;
  wanted_.reserve(size_t(o.max_step_tokens));
  upload_.allocate(device, max_ints);
}

Plan StepPlanner::plan_padded(const StepInput& step, int batch) {
  const int n = int(step.kv_lengths.size());
  const int longest = *std::max_element(step.kv_lengths.begin(), step.kv_lengths.end());
  const int bound =
      std::min(std::max(kMinGraphKv, int(std::bit_ceil(unsigned(longest)))), max_kv_length_);
  const int stride = std::min(table_entries(step.views[0], bound), max_table_entries_);
  Plan plan = plan_of(step);
  const StepUpload::Place ids = upload_.take(size_t(batch));
  std::copy_n(step.token_ids.begin(), n, ids.host);
  std::fill(ids.host + n, ids.host + batch, 0);
  plan.token_ids = ids.device;
  plan.n = plan.n_wanted = plan.n_logits = batch;
  plan.all = upload_.add(step.q_offsets, step.kv_lengths, step.views, 0, n, batch, batch, stride);
  plan.all.max_q_tokens = 1;
  plan.all.max_kv_length = bound;
  plan.parts.decode = plan.wanted_parts.decode = plan.all;
  return plan;
}

// The parts of `all`: its first n_decode sequences as they lie there, the others in arrays of their
// own.
AttentionParts StepPlanner::split(const CudaStep& all, const StepInput& step, int n_decode,
                                  int table_stride) {
  AttentionParts parts;
  if (n_decode > 0) {
    parts.decode = all;
    parts.decode.n_seqs = parts.decode.n_tokens = n_decode;
    parts.decode.max_q_tokens = 1;
  }
  if (n_decode == 0)
    parts.prefill = all;
  else if (n_decode < all.n_seqs)
    parts.prefill =
        upload_.add(step.q_offsets, step.kv_lengths, step.views, n_decode, all.n_seqs - n_decode,
                    all.n_seqs - n_decode, all.n_tokens - n_decode, table_stride);
  return parts;
}

Plan StepPlanner::plan(const StepInput& original, bool split_phases) {
  ordered_.take(original, split_phases);
  const StepInput step = ordered_.input();
  const int n = int(step.token_ids.size()), n_seqs = int(step.kv_lengths.size());
  int stride = 1;
  for (size_t s = 0; s < step.views.size(); ++s)
    stride = std::max(stride, table_entries(step.views[s], step.kv_lengths[s]));
  Plan plan = plan_of(step);
  plan.n = n;
  const StepUpload::Place ids = upload_.take(size_t(n));
  std::copy_n(step.token_ids.begin(), n, ids.host);
  plan.token_ids = ids.device;
  plan.all = upload_.add(step.q_offsets, step.kv_lengths, step.views, 0, n_seqs, n_seqs, n, stride);
  plan.parts = split(plan.all, step, ordered_.n_decode, stride);
  plan.n_logits = int(step.logit_rows.size());
  if (plan.n_logits == 0) return plan;

  wanted_.select(step);
  plan.n_wanted = int(wanted_.tokens.size());
  if (plan.n_wanted == n) {
    plan.wanted_parts = plan.parts;
  } else {
    const StepUpload::Place rows = upload_.take(size_t(plan.n_wanted));
    std::copy_n(wanted_.tokens.begin(), plan.n_wanted, rows.host);
    plan.wanted = rows.device;
    const StepInput few{{}, wanted_.q_offsets, wanted_.kv_lengths, wanted_.views, {}, nullptr};
    const int n_few = int(few.kv_lengths.size());
    const CudaStep all = upload_.add(few.q_offsets, few.kv_lengths, few.views, 0, n_few, n_few,
                                     plan.n_wanted, stride);
    // Wanted tokens of one-token sequences stand first, one each.
    int n_decode = 0;
    while (n_decode < plan.n_wanted && wanted_.tokens[size_t(n_decode)] < ordered_.n_decode)
      ++n_decode;
    plan.wanted_parts = split(all, few, n_decode, stride);
  }
  const StepUpload::Place rows = upload_.take(size_t(plan.n_logits));
  for (size_t i = 0; i < size_t(plan.n_logits); ++i)
    rows.host[i] = wanted_.logit_rows[size_t(ordered_.logit_order[i])];
  plan.logit_rows = rows.device;
  return plan;
}

const Draw* StepPlanner::add(std::span<const Draw> rows) {
  if (rows.empty()) return nullptr;
  const StepUpload::Place place = upload_.take(rows.size() * kSamplingInts);
  std::memcpy(place.host, rows.data(), rows.size_bytes());
  return reinterpret_cast<const Draw*>(place.device);
}

}  // namespace xpyd

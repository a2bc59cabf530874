#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "model/cuda/plan_cuda.h"

namespace xpyd::model {

int table_entries(const KvView& view, int kv_length) {
  if (view.contiguous()) return 1;
  return (kv_length + view.layout->block_tokens - 1) / view.layout->block_tokens;
}

void StepUpload::allocate(int32_t* device, size_t max_ints) {
  device_ = device;
  capacity_ = max_ints;
  for (cuda::Memory& piece : pinned_) piece = cuda::Memory::pinned(max_ints * sizeof(int32_t));
}

void StepUpload::begin() {
  piece_ = (piece_ + 1) % kPieces;
  copied_[size_t(piece_)].wait();
  used_ = 0;
}

StepUpload::Place StepUpload::take(size_t n) {
  XPYD_CHECK(used_ + n <= capacity_, std::to_string(used_ + n) + " of " + std::to_string(capacity_));
  Place place{pinned_[size_t(piece_)].as<int32_t>() + used_, device_ + used_};
  used_ += n;
  return place;
}

CudaStep StepUpload::add(std::span<const int32_t> q_offsets, std::span<const int32_t> kv_lengths,
                         std::span<const KvView> views, int first, int n, const Sizes& sizes, int window,
                         const CudaStep* tables) {
  const size_t n_seqs = size_t(sizes.n_seqs), n_tokens = size_t(sizes.n_tokens);
  const Place offsets = take(n_seqs + 1), lengths = take(n_seqs), seqs = take(n_tokens), positions = take(n_tokens);
  CudaStep step{.q_offsets = offsets.device,
                .kv_lengths = lengths.device,
                .token_seqs = seqs.device,
                .positions = positions.device,
                .n_seqs = sizes.n_seqs,
                .n_tokens = sizes.n_tokens};
  int token = 0;
  offsets.host[0] = 0;
  for (int i = 0; i < n; ++i) {
    const size_t s = size_t(first + i);
    const int q_tokens = q_offsets[s + 1] - q_offsets[s], length = kv_lengths[s];
    for (int t = 0; t < q_tokens; ++t, ++token) {
      seqs.host[token] = i;
      positions.host[token] = length - q_tokens + t;
    }
    offsets.host[i + 1] = token;
    lengths.host[i] = length;
    step.contiguous = views[s].contiguous();
    step.max_q_tokens = std::max(step.max_q_tokens, q_tokens);
    step.max_kv_length = std::max(step.max_kv_length, length);
  }
  XPYD_CHECK(token <= sizes.n_tokens, std::to_string(token));
  std::fill(offsets.host + n + 1, offsets.host + n_seqs + 1, token);
  std::fill(lengths.host + n, lengths.host + n_seqs, 0);
  std::fill(seqs.host + token, seqs.host + n_tokens, 0);
  std::fill(positions.host + token, positions.host + n_tokens, 0);
  if (tables) {
    step.block_tables = tables->block_tables;
    step.table_begins = tables->table_begins + first;
  } else {
    const Place begins = take(n_seqs), table = take(size_t(sizes.table_entries));
    int at = 0;
    for (int i = 0; i < n; ++i) {
      const KvView& view = views[size_t(first + i)];
      const int entries = table_entries(view, kv_lengths[size_t(first + i)]);
      XPYD_CHECK(at + entries <= sizes.table_entries, std::to_string(entries));
      begins.host[i] = at;
      if (view.contiguous())
        table.host[at] = view.slot;
      else
        std::memcpy(table.host + at, view.block_table, size_t(entries) * sizeof(int32_t));
      at += entries;
    }
    std::fill(begins.host + n, begins.host + n_seqs, 0);
    std::fill(table.host + at, table.host + sizes.table_entries, 0);
    step.block_tables = table.device, step.table_begins = begins.device;
  }
  if (sizes.n_splits == 0) return step;
  constexpr size_t kInts = sizeof(CudaSplit) / sizeof(int32_t);
  used_ += used_ % kInts;  // aligned, because the device reads a split in one access
  const Place splits = take(size_t(sizes.n_splits) * kInts), begins = take(n_seqs);
  CudaSplit* to = reinterpret_cast<CudaSplit*>(splits.host);
  int listed = 0;
  for (int i = 0; i < n; ++i) {
    const CudaSplitRange range = cuda_splits(kv_lengths[size_t(first + i)], window);
    XPYD_CHECK(listed + range.end - range.begin <= sizes.n_splits, std::to_string(listed));
    begins.host[i] = listed;
    for (int split = range.begin; split < range.end; ++split) to[listed++] = {i, split};
  }
  std::fill(begins.host + n, begins.host + n_seqs, 0);
  std::fill(to + listed, to + sizes.n_splits, CudaSplit{-1, 0});
  step.splits = reinterpret_cast<const CudaSplit*>(splits.device), step.n_splits = sizes.n_splits;
  step.split_begins = begins.device;
  return step;
}

void StepUpload::copy(cuda::Stream& stream) {
  cuda::copy(device_, pinned_[size_t(piece_)].data(), bytes(), stream);
  copied_[size_t(piece_)].record(stream);
}

namespace {

constexpr size_t kSamplingInts = sizeof(Draw) / sizeof(int32_t);
static_assert(sizeof(Draw) % sizeof(int32_t) == 0 && alignof(Draw) == alignof(int32_t));
// Most splits of one attention call: more than 2 M tokens, which few cards hold. 32 heads of 128 take 69 MB.
constexpr int kMaxSplits = 4096;

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
    size_t next = 0;  // index into step.logit_rows
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
      token_ids.insert(token_ids.end(), step.token_ids.begin() + begin, step.token_ids.begin() + end);
      q_offsets.push_back(int32_t(token_ids.size()));
      kv_lengths.push_back(step.kv_lengths[size_t(s)]);
      views.push_back(step.views[size_t(s)]);
      n_decode += sort && pass == 0;
    }
  }
}

int StepPlanner::max_splits(const CudaModelOptions& o) {
  const int longest = cuda_splits(o.max_kv_length, 0).end;
  return std::min(o.max_seqs * longest, std::max(longest, kMaxSplits));
}

size_t StepPlanner::max_ints(const CudaModelOptions& o) {
  const size_t rows = size_t(o.max_step_tokens), seqs = size_t(o.max_seqs),
               splits = size_t(o.max_seqs) * size_t(cuda_splits(o.max_kv_length, 0).end);
  // All sequences and the wanted ones; for both: all of them, those with one token, and the others.
  const size_t part = 2 * rows + 4 * seqs + 2;
  return 2 * rows + 6 * part + 2 * (seqs * size_t(o.max_table_entries) + 2 * splits) +
         size_t(o.max_logits) * (1 + kSamplingInts);
}

void StepPlanner::allocate(const CudaModelOptions& o, int window, int32_t* device, size_t max_ints) {
  max_kv_length_ = o.max_kv_length;
  max_table_entries_ = o.max_table_entries;
  max_splits_ = max_splits(o);
  window_ = window;
  wanted_.reserve(size_t(o.max_step_tokens));
  upload_.allocate(device, max_ints);
}

std::optional<Plan> StepPlanner::plan_padded(const StepInput& step, int batch) {
  const int n = int(step.kv_lengths.size());
  int longest = 0, n_splits = 0;  // for all tokens, whatever the window
  for (int length : step.kv_lengths) longest = std::max(longest, length), n_splits += cuda_splits(length, 0).end;
  if (n_splits > max_splits_) return std::nullopt;
  n_splits = std::min(int(std::bit_ceil(unsigned(std::max(n_splits, batch)))), max_splits_);
  const int entries = step.views[0].contiguous() ? batch
                                                 : std::min(n_splits * table_entries(step.views[0], kCudaSplitTokens),
                                                            batch * max_table_entries_);
  // Most splits that a window touches, wherever it begins.
  if (window_ > 0) n_splits = std::min(n_splits, batch * (window_ / kCudaSplitTokens + 2));
  Plan plan = plan_of(step);
  const StepUpload::Place ids = upload_.take(size_t(batch));
  std::copy_n(step.token_ids.begin(), n, ids.host);
  std::fill(ids.host + n, ids.host + batch, 0);
  plan.token_ids = ids.device;
  plan.n = plan.n_wanted = plan.n_logits = batch;
  plan.all = upload_.add(step.q_offsets, step.kv_lengths, step.views, 0, n, {batch, batch, entries, n_splits}, window_);
  plan.table_entries = entries;
  plan.all.max_kv_length = longest > kCudaSplitTokens ? max_kv_length_ : kCudaSplitTokens;
  plan.parts.decode = plan.wanted_parts.decode = {plan.all};
  return plan;
}

CudaStep StepPlanner::add_all(const StepInput& step, int n_tokens) {
  const int n_seqs = int(step.kv_lengths.size());
  int entries = 0;
  for (size_t s = 0; s < step.views.size(); ++s) entries += table_entries(step.views[s], step.kv_lengths[s]);
  return upload_.add(step.q_offsets, step.kv_lengths, step.views, 0, n_seqs, {n_seqs, n_tokens, entries});
}

// Splits `all` into parts that share its block tables.
AttentionParts StepPlanner::split(const CudaStep& all, const StepInput& step, int n_decode) {
  AttentionParts parts;
  auto add = [&](int first, int n, int n_tokens, int n_splits) {
    return upload_.add(step.q_offsets, step.kv_lengths, step.views, first, n, {n, n_tokens, 0, n_splits}, window_,
                       &all);
  };
  for (int first = 0, end = 0; first < n_decode; first = end) {
    int n_splits = 0;
    for (; end < n_decode; ++end) {
      const CudaSplitRange range = cuda_splits(step.kv_lengths[size_t(end)], window_);
      if (n_splits + range.end - range.begin > max_splits_) break;
      n_splits += range.end - range.begin;
    }
    parts.decode.push_back(add(first, end - first, end - first, n_splits));
  }
  if (n_decode == 0)
    parts.prefill = all;
  else if (n_decode < all.n_seqs)
    parts.prefill = add(n_decode, all.n_seqs - n_decode, all.n_tokens - n_decode, 0);
  return parts;
}

Plan StepPlanner::plan(const StepInput& original, bool split_phases) {
  ordered_.take(original, split_phases);
  const StepInput step = ordered_.input();
  const int n = int(step.token_ids.size());
  Plan plan = plan_of(step);
  plan.n = n;
  const StepUpload::Place ids = upload_.take(size_t(n));
  std::copy_n(step.token_ids.begin(), n, ids.host);
  plan.token_ids = ids.device;
  plan.all = add_all(step, n);
  plan.parts = split(plan.all, step, ordered_.n_decode);
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
    const CudaStep all = add_all(few, plan.n_wanted);
    // Wanted tokens of one-token sequences come first, one each.
    int n_decode = 0;
    while (n_decode < plan.n_wanted && wanted_.tokens[size_t(n_decode)] < ordered_.n_decode) ++n_decode;
    plan.wanted_parts = split(all, few, n_decode);
  }
  const StepUpload::Place rows = upload_.take(size_t(plan.n_logits));
  for (size_t i = 0; i < size_t(plan.n_logits); ++i) rows.host[i] = wanted_.logit_rows[size_t(ordered_.logit_order[i])];
  plan.logit_rows = rows.device;
  return plan;
}

const Draw* StepPlanner::add(std::span<const Draw> rows) {
  if (rows.empty()) return nullptr;
  const StepUpload::Place place = upload_.take(rows.size() * kSamplingInts);
  std::memcpy(place.host, rows.data(), rows.size_bytes());
  return reinterpret_cast<const Draw*>(place.device);
}

}  // namespace xpyd::model

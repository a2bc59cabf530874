#include <algorithm>
#include <cstring>
#include <string>

#include "model/step_cuda.h"

namespace xpyd {

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
  used_ += used_ % kInts;  // they are read in one piece
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

}  // namespace xpyd

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
  XPYD_CHECK(used_ + n <= capacity_,
             std::to_string(used_ + n) + " of " + std::to_string(capacity_));
  Place place{pinned_[size_t(piece_)].as<int32_t>() + used_, device_ + used_};
  used_ += n;
  return place;
}

CudaStep StepUpload::add(std::span<const int32_t> q_offsets, std::span<const int32_t> kv_lengths,
                         std::span<const KvView> views, int first, int n, int n_seqs, int n_tokens,
                         int table_stride) {
  const Place offsets = take(size_t(n_seqs) + 1), lengths = take(size_t(n_seqs)),
              seqs = take(size_t(n_tokens)), positions = take(size_t(n_tokens)),
              tables = take(size_t(n_seqs) * size_t(table_stride));
  CudaStep step{.q_offsets = offsets.device,
                .kv_lengths = lengths.device,
                .token_seqs = seqs.device,
                .positions = positions.device,
                .block_tables = tables.device,
                .table_stride = table_stride,
                .n_seqs = n_seqs,
                .n_tokens = n_tokens};
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
    const KvView& view = views[s];
    const int entries = table_entries(view, length);
    XPYD_CHECK(entries <= table_stride, std::to_string(entries));
    int32_t* table = tables.host + size_t(i) * size_t(table_stride);
    if (view.contiguous())
      table[0] = view.slot;
    else
      std::memcpy(table, view.block_table, size_t(entries) * sizeof(int32_t));
    std::fill(table + entries, table + table_stride, 0);
    step.contiguous = view.contiguous();
    step.max_q_tokens = std::max(step.max_q_tokens, q_tokens);
    step.max_kv_length = std::max(step.max_kv_length, length);
  }
  for (int i = n; i < n_seqs; ++i) {
    offsets.host[i + 1] = token;
    lengths.host[i] = 0;
  }
  std::fill(tables.host + size_t(n) * size_t(table_stride),
            tables.host + size_t(n_seqs) * size_t(table_stride), 0);
  XPYD_CHECK(token <= n_tokens, std::to_string(token) + " of " + std::to_string(n_tokens));
  std::fill(seqs.host + token, seqs.host + n_tokens, 0);
  std::fill(positions.host + token, positions.host + n_tokens, 0);
  return step;
}

void StepUpload::copy(cuda::Stream& stream) {
  cuda::copy(device_, pinned_[size_t(piece_)].data(), used_ * sizeof(int32_t), stream);
  copied_[size_t(piece_)].record(stream);
}

}  // namespace xpyd

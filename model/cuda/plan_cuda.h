// A step in the form that the device runs. The host puts one-token sequences first if two kernels share the attention,
// and packs all arrays into one upload.
//
// Thread safety: one thread, its stream's.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "allocator/kv/kv_layout.h"
#include "attention/cuda/attention_cuda.h"
#include "base/cuda/cuda.h"
#include "model/cuda/model_cuda.h"
#include "model/cuda/sampler_cuda.h"
#include "model/llama/llama_step.h"

namespace xpyd::model {

// Uploads a step's arrays. It packs them into pinned memory and copies them at once. Device addresses depend on the
// sizes only, so a captured graph finds the next step's arrays at the same addresses.
class StepUpload {
 public:
  StepUpload() = default;
  // Requires: `device` holds max_ints int32; the caller owns it.
  void allocate(int32_t* device, size_t max_ints);

  // Waits for the copy before the last one, which is normally done, and starts an empty upload.
  void begin();
  // An array of n entries: its address for the host to write, and its address on the device.
  struct Place {
    int32_t* host;
    const int32_t* device;
  };
  Place take(size_t n);
  // Sizes of the arrays for sequences [first, first + n) of a step. Tokens count from 0. Entries beyond the real ones
  // pad: sequences without tokens, tokens of no sequence, splits of no sequence.
  struct Sizes {
    int n_seqs, n_tokens;
    int table_entries;  // of all block tables together
    int n_splits = 0;   // 0: no list of splits, as for prefill
  };
  // Adds these sequences. `tables`: another step of the same sequences, whose block tables are shared.
  CudaStep add(std::span<const int32_t> q_offsets, std::span<const int32_t> kv_lengths, std::span<const KvView> views,
               int first, int n, const Sizes& sizes, int window = 0, const CudaStep* tables = nullptr);
  void copy(cuda::Stream& stream);
  size_t bytes() const { return used_ * sizeof(int32_t); }

 private:
  static constexpr int kPieces = 2;  // the host writes one while the device may still read the other
  int32_t* device_ = nullptr;
  size_t capacity_ = 0, used_ = 0;
  std::array<cuda::Memory, kPieces> pinned_;
  std::array<cuda::Event, kPieces> copied_;
  int piece_ = 0;
};

// Entries of the block table for a sequence of kv_length tokens; contiguous KV has 1, the slot.
int table_entries(const KvView& view, int kv_length);

// Sequences as attention takes them: one-token sequences first, then the others. Decode is cut into several calls if
// its splits exceed the workspace.
struct AttentionParts {
  std::vector<CudaStep> decode;  // each part's tokens follow those of the part before
  CudaStep prefill;              // n_seqs may be 0; its tokens come last
};

// A step on the device. All work enqueued for it depends on these values only.
struct Plan {
  const int32_t* token_ids = nullptr;  // [n]
  int n = 0;                           // rows, padding included
  CudaStep all;                        // for append
  int table_entries = 0;               // block-table entries of a padded step
  AttentionParts parts;
  // Rows that go on after the last layer's append; null: all.
  const int32_t* wanted = nullptr;  // [n_wanted]
  int n_wanted = 0;
  AttentionParts wanted_parts;
  const int32_t* logit_rows = nullptr;  // [n_logits] indices into the wanted rows
  int n_logits = 0;
  std::byte* pool = nullptr;
  KvLayout layout;
};

// A step with its one-token sequences first. Moving whole sequences changes no result; `logit_order` restores the
// caller's order of logits.
struct OrderedStep {
  void take(const StepInput& step, bool sort);
  StepInput input() const { return {token_ids, q_offsets, kv_lengths, views, logit_rows, nullptr}; }
  int n_decode = 0;  // one-token sequences, at the front
  std::vector<int32_t> token_ids, q_offsets, kv_lengths, logit_rows;
  std::vector<KvView> views;
  std::vector<int32_t> logit_order;  // [n_logits]: index into logit_rows of the caller's logit i
};

class StepPlanner {
 public:
  // Number of int32 of the largest step that these options allow.
  static size_t max_ints(const CudaModelOptions& options);
  // Most splits of one decode part.
  static int max_splits(const CudaModelOptions& options);
  // window: the largest sliding window if all layers have one; 0: some layer sees everything.
  void allocate(const CudaModelOptions& options, int window, int32_t* device, size_t max_ints);

  // Call once per step, in this order: begin(), one of the plans, add(), copy().
  void begin() { upload_.begin(); }
  // Plans any step. split: the decode kernel takes one-token sequences, the prefill kernel the others.
  Plan plan(const StepInput& step, bool split);
  // Plans a step of one token per sequence with all logits wanted. It pads to `batch` sequences and to the next power
  // of two of splits, so that all such steps share one plan. Returns nothing if the splits need several parts.
  std::optional<Plan> plan_padded(const StepInput& step, int batch);
  // Uploads the draws and returns their device address; null for no draws.
  const Draw* add(std::span<const Draw> rows);
  void copy(cuda::Stream& stream) { upload_.copy(stream); }
  size_t bytes() const { return upload_.bytes(); }  // bytes that copy() moves

 private:
  CudaStep add_all(const StepInput& step, int n_tokens);
  AttentionParts split(const CudaStep& all, const StepInput& step, int n_decode);

  int max_kv_length_ = 0, max_table_entries_ = 0, max_splits_ = 0, window_ = 0;
  WantedRows wanted_;
  OrderedStep ordered_;
  StepUpload upload_;
};

}  // namespace xpyd::model

// A step as the device will run it. The host puts one-token sequences first, where two kernels
// share the attention, and packs every array into one upload.
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

// A step's arrays on their way to the card: packed one behind another into pinned memory and copied
// at once. Device addresses follow from the sizes alone, so that a captured graph finds the next
// step's arrays where the first one's were.
class StepUpload {
 public:
  StepUpload() = default;
  // `device` holds max_ints int32 and belongs to the caller.
  void allocate(int32_t* device, size_t max_ints);

  // Waits until the copy before the last has been made (it has, unless the CPU is two steps ahead), then starts over.
  void begin();
  // n entries: where the host writes them, and where the device will find them.
  struct Place {
    int32_t* host;
    const int32_t* device;
  };
  Place take(size_t n);
  // Sequences [first, first + n) of a step, their tokens counted from 0, in arrays of these sizes:
  // beyond the real ones are sequences without tokens, tokens of no sequence and splits of none.
  struct Sizes {
    int n_seqs, n_tokens;
    int table_entries;  // of all block tables together
    int n_splits = 0;   // 0: no list, not for decode rows
  };
  // `tables`: another step of these sequences, whose tables serve this one too.
  CudaStep add(std::span<const int32_t> q_offsets, std::span<const int32_t> kv_lengths, std::span<const KvView> views,
               int first, int n, const Sizes& sizes, int window = 0, const CudaStep* tables = nullptr);
  void copy(cuda::Stream& stream);
  size_t bytes() const { return used_ * sizeof(int32_t); }

 private:
  static constexpr int kPieces = 2;  // one is written while the other may still be read
  int32_t* device_ = nullptr;
  size_t capacity_ = 0, used_ = 0;
  std::array<cuda::Memory, kPieces> pinned_;
  std::array<cuda::Event, kPieces> copied_;
  int piece_ = 0;
};

// Entries of the block table that a sequence of kv_length tokens uses; contiguous: 1, the slot.
int table_entries(const KvView& view, int kv_length);

// Sequences as attention takes them: those with one query token first, then the others. Decode is
// cut into several calls where its splits are more than the workspace has room for.
struct AttentionParts {
  std::vector<CudaStep> decode;  // each one's tokens follow those of the one before
  CudaStep prefill;              // n_seqs may be 0; its tokens come last
};

// A step on the device. Everything that is enqueued for it depends on these values alone.
struct Plan {
  const int32_t* token_ids = nullptr;  // [n]
  int n = 0;                           // rows, padding included
  CudaStep all;                        // for append
  int table_entries = 0;               // of a padded step's block tables
  AttentionParts parts;
  // The last layer: rows that go on after the append; null: all do.
  const int32_t* wanted = nullptr;  // [n_wanted]
  int n_wanted = 0;
  AttentionParts wanted_parts;
  const int32_t* logit_rows = nullptr;  // [n_logits] into the wanted rows
  int n_logits = 0;
  std::byte* pool = nullptr;
  KvLayout layout;
};

// The step with its one-token sequences first. Moving whole sequences changes no result; logits
// keep their order through `logit_order`.
struct OrderedStep {
  void take(const StepInput& step, bool sort);
  StepInput input() const { return {token_ids, q_offsets, kv_lengths, views, logit_rows, nullptr}; }
  int n_decode = 0;  // sequences with one token, at the front
  std::vector<int32_t> token_ids, q_offsets, kv_lengths, logit_rows;
  std::vector<KvView> views;
  std::vector<int32_t> logit_order;  // [n_logits]: where logit i of the caller stands in logit_rows
};

class StepPlanner {
 public:
  // int32 of the largest step that these options allow.
  static size_t max_ints(const CudaModelOptions& options);
  // Splits of one decode part, at most.
  static int max_splits(const CudaModelOptions& options);
  // window: the least that no layer sees beyond; 0: some layer sees everything.
  void allocate(const CudaModelOptions& options, int window, int32_t* device, size_t max_ints);

  // In this order, once per step: begin(), one of the plans, add(), copy().
  void begin() { upload_.begin(); }
  // Any step. split: one-token sequences are taken by the decode kernel, others by the prefill kernel.
  Plan plan(const StepInput& step, bool split);
  // A step of one token per sequence with all logits wanted, padded to `batch` sequences and to the next power of two
  // of splits: the same plan for all such steps. Nothing where its splits take several parts.
  std::optional<Plan> plan_padded(const StepInput& step, int batch);
  // Where the device finds these rows; null where there are none.
  const Draw* add(std::span<const Draw> rows);
  void copy(cuda::Stream& stream) { upload_.copy(stream); }
  size_t bytes() const { return upload_.bytes(); }  // that copy() moves

 private:
  CudaStep add_all(const StepInput& step, int n_tokens);
  AttentionParts split(const CudaStep& all, const StepInput& step, int n_decode);

  int max_kv_length_ = 0, max_table_entries_ = 0, max_splits_ = 0, window_ = 0;
  WantedRows wanted_;
  OrderedStep ordered_;
  StepUpload upload_;
};

}  // namespace xpyd::model

// A step's arrays on their way to the card: packed one behind another into pinned memory and copied
// at once. Device addresses follow from the sizes alone, so that a captured graph finds the next
// step's arrays where the first one's were.
//
// Thread safety: one thread, its stream's.
#pragma once

#include <array>
#include <span>

#include "allocator/kv_layout.h"
#include "attention/attention_cuda.h"
#include "base/cuda.h"

namespace xpyd {

class StepUpload {
 public:
  StepUpload() = default;
  // `device` holds max_ints int32 and belongs to the caller.
  void allocate(int32_t* device, size_t max_ints);

  // Waits until the copy before the last has been made (it has, unless the CPU is two steps ahead),
  // then starts over.
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

}  // namespace xpyd

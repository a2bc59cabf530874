// Speculative decoding (Leviathan et al. 2023; Chen et al. 2023). A drafter proposes tokens that a sequence may output
// next. The engine computes them in the same step as the next token and keeps them up to the first wrong one
// (Engine::choose_checked).
//
// The engine samples from each row of logits exactly as it would without drafts; a draft is accepted if it equals that
// sample. For drafts without probabilities this is rejection sampling: a draft is accepted with the model's probability
// for it, and otherwise another token is drawn in proportion. Text, logprobs and the logits' hash are therefore those
// of decoding without drafts (arXiv 2408.07978, section 3, calls this drafter-invariant).
//
// Thread safety: the engine's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "allocator/kv_memory.h"
#include "base/clock.h"
#include "model/model.h"

namespace xpyd::batch {

struct Sequence;

// A drafter's state for one sequence. It follows the sequence within a process.
struct DraftMemory {
  virtual ~DraftMemory() = default;
};

struct DraftWish {
  const Sequence* sequence;
  std::span<const int32_t> tokens;  // prompt and output so far, all known
  std::unique_ptr<DraftMemory>& memory;
  int most;                          // drafts wanted at most, at least 1
  std::vector<int32_t> drafts = {};  // the answer: at most `most` tokens
};

class Drafter {
 public:
  virtual ~Drafter() = default;
  // Fills `drafts` of each wish; none is a valid answer.
  virtual void draft(std::span<DraftWish> wishes) = 0;
  // True: the drafter writes KV into the sequence's memory, and the caller makes room for `most` more tokens first.
  virtual bool in_place() const { return false; }
  // Seconds beside the step for one more draft of every sequence; 0: drafts are free.
  virtual double round_seconds() const { return 0; }
};

inline constexpr int kMostDrafts = 64;  // per sequence and step

// The parts of an engine that a drafter may use.
struct DrafterParts {
  Model& model;
  KvMemory& memory;
  Clock& clock;
};

struct DrafterRow {
  const char* name;
  std::unique_ptr<Drafter> (*make)(const DrafterParts& parts);  // null: no drafts
  const char* source;
  bool uses_head = false;  // it needs a model with a multi-token head
};

struct SpeculationOptions {
  const DrafterRow* drafter = nullptr;  // null: no speculation
  int tokens = 0;                       // drafts per sequence and step; 0: chosen by expected gain (draft_length.h)
  bool on() const { return drafter && drafter->make; }
};

std::span<const DrafterRow> drafters();
const DrafterRow* find_drafter(std::string_view name);  // null: no such row

}  // namespace xpyd::batch

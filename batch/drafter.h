// Speculative decoding (Leviathan et al. 2023; Chen et al. 2023): tokens that a sequence may put out next are computed
// in the step that computes its next one anyway, and kept as far as they turn out to be right. A row of the table says
// where drafts come from; the engine checks them (Engine::choose_checked).
//
// The engine draws from each row of logits what it would have drawn without drafts, and a draft is right if it is that
// token. For drafts of which nobody says how likely they are, this is rejection sampling: a draft is accepted with the
// probability that the model gives it, else another token is drawn in proportion. And text, logprobs and the logits'
// hash are those of decoding without drafts, whatever is drafted (arXiv 2408.07978, section 3, calls it
// drafter-invariant).
//
// Thread safety: the engine's.
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

// What a drafter knows of one sequence; it goes where the sequence goes within a process.
struct DraftMemory {
  virtual ~DraftMemory() = default;
};

struct DraftWish {
  const Sequence* sequence;
  std::span<const int32_t> tokens;  // its own, all known: prompt and output so far
  std::unique_ptr<DraftMemory>& memory;
  int most;                          // at least 1
  std::vector<int32_t> drafts = {};  // the answer: at most so many that may come next
};

class Drafter {
 public:
  virtual ~Drafter() = default;
  virtual void draft(std::span<DraftWish> wishes) = 0;
  // It writes KV beside the sequence's own: there is room for `most` more tokens.
  virtual bool in_place() const { return false; }
  // What one more draft of every sequence takes, beside the step; 0: nothing.
  virtual double round_seconds() const { return 0; }
};

inline constexpr int kMostDrafts = 64;  // of a sequence in a step

// What an engine has.
struct DrafterParts {
  Model& model;
  KvMemory& memory;
  Clock& clock;
};

struct SpeculationOptions;
struct DrafterRow {
  const char* name;
  std::unique_ptr<Drafter> (*make)(const SpeculationOptions& options, const DrafterParts& parts);  // null: no drafts
  const char* source;
  bool uses_head = false;  // the engine's model has a multi-token head
};

struct SpeculationOptions {
  const DrafterRow* drafter = nullptr;  // null: none
  int tokens = 0;                       // drafts of a sequence in a step, at most; 0: as many as pay (draft_length.h)
  int ngram_min = 2, ngram_max = 4;     // tokens that must be alike, and those that are looked for first
  bool on() const { return drafter && drafter->make; }
};

std::span<const DrafterRow> drafters();
const DrafterRow* find_drafter(std::string_view name);  // null: no such row

}  // namespace xpyd::batch

#include "batch/draft_model.h"

#include <algorithm>
#include <cstring>

#include "allocator/kv_copy.h"
#include "batch/sequence.h"

namespace xpyd::batch {

void DraftDraws::begin(std::span<DraftWish*> wishes) {
  drawn_.clear();
  for (DraftWish* wish : wishes) drawn_.push_back({wish, wish->sequence->sampler});
}

void DraftDraws::draw(size_t i, std::span<const float> logits) {
  Drawn& d = drawn_[i];
  SamplingParams params = d.wish->sequence->request->sampling;
  params.top_logprobs = -1;
  d.wish->drafts.push_back(sample(logits, params, d.sampler, scratch_).chosen.token);
}

void DraftStep::add(std::span<const int32_t> tokens, int length, KvHandle kv, bool wants_logits) {
  ids_.insert(ids_.end(), tokens.begin(), tokens.end());
  offsets_.push_back(int(ids_.size()));
  lengths_.push_back(length);
  kv_.push_back(kv);
  if (wants_logits) logit_rows_.push_back(offsets_.back() - 1);
}

StepInput DraftStep::input(const KvMemory& memory) {
  views_.clear();
  for (int rank = 0; rank < memory.n_ranks(); ++rank)
    for (KvHandle kv : kv_) views_.push_back(memory.view(kv, rank));
  return {.token_ids = ids_, .q_offsets = offsets_, .kv_lengths = lengths_, .views = views_, .logit_rows = logit_rows_};
}

std::span<const float> DraftStep::forward(Model& model, const KvMemory& memory) {
  logits_.resize(logit_rows_.size() * size_t(model.config().vocab));
  model.forward(input(memory), logits_.data());
  return logits_;
}

std::span<const float> DraftStep::predict(Model& model, const KvMemory& memory, const HiddenStates& hidden) {
  logits_.resize(kv_.size() * size_t(model.config().vocab));
  StepInput step = input(memory);
  step.hidden = hidden;
  model.predict(step, logits_.data());
  return logits_;
}

namespace {

// Of one sequence: which tokens the draft model has computed. Their KV is given up with this.
struct ModelDrafts final : DraftMemory {
  explicit ModelDrafts(std::shared_ptr<DraftModel> of) : model(std::move(of)) {}
  ~ModelDrafts() override {
    if (kv != kNoKv) model->memory->free(kv);
  }
  const std::shared_ptr<DraftModel> model;
  KvHandle kv = kNoKv;
  std::vector<int32_t> tokens;
};

class ModelDrafter final : public Drafter {
 public:
  ModelDrafter(std::shared_ptr<DraftModel> model, Clock& clock) : model_(std::move(model)), time_(clock) {}

  void draft(std::span<DraftWish> wishes) override {
    rows_.clear();
    begun_.clear();
    int left = model_->step_tokens;
    for (DraftWish& wish : wishes)
      if (left > 0) left -= begin(wish, left);
    draws_.begin(begun_);
    for (bool first = true; !rows_.empty(); first = false) {
      time_.begin();
      forward();
      if (!first) time_.end();
    }
  }
  double round_seconds() const override { return time_.mean_s(); }

 private:
  struct Row {
    ModelDrafts* own;
    int n_tokens;  // the last ones of own->tokens
    int draws;     // of draws_; -1: there are more tokens to compute before it can draft
  };

  // Puts what has to be computed before the first draft into rows_, as far as there is room. Its tokens.
  int begin(DraftWish& wish, int most) {
    KvMemory& memory = *model_->memory;
    const auto known = wish.tokens;
    if (int(known.size()) + wish.most > model_->model->config().max_position) return 0;
    if (!wish.memory) wish.memory = std::make_unique<ModelDrafts>(model_);
    auto& own = static_cast<ModelDrafts&>(*wish.memory);
    if (own.kv == kNoKv) {
      const auto reserved = memory.reserve(known, wish.sequence->salt());
      if (!reserved) return 0;
      own.kv = reserved.value().handle;
      own.tokens.assign(known.begin(), known.begin() + reserved.value().cached_tokens);
    }
    const auto before = known.first(known.size() - 1);  // of the last one the logits are wanted
    const int right = int(std::ranges::mismatch(own.tokens, before).in1 - own.tokens.begin());
    const int written = memory.written_tokens(own.kv);
    if (right > written) memory.written(own.kv, before.subspan(size_t(written), size_t(right - written)));
    const int n = std::min(int(known.size()) - right, most);
    const bool drafts = right + n == int(known.size());
    if (!memory.append(own.kv, n + (drafts ? wish.most - 1 : 0))) {
      wish.memory.reset();
      return 0;
    }
    own.tokens.assign(known.begin(), known.begin() + right + n);
    rows_.push_back({&own, n, drafts ? int(begun_.size()) : -1});
    if (drafts) begun_.push_back(&wish);
    return n;
  }

  // Computes the rows; those that go on have their draft as the next token.
  void forward() {
    step_.clear();
    for (const Row& row : rows_) {
      const auto& tokens = row.own->tokens;
      step_.add(std::span(tokens).last(size_t(row.n_tokens)), int(tokens.size()), row.own->kv, row.draws >= 0);
    }
    const size_t vocab = size_t(model_->model->config().vocab);
    std::span<const float> logits = step_.forward(*model_->model, *model_->memory);
    std::erase_if(rows_, [&](Row& row) {
      if (row.draws < 0) return true;
      draws_.draw(size_t(row.draws), logits.first(vocab));
      logits = logits.subspan(vocab);
      if (!draws_.wants_more(size_t(row.draws))) return true;
      row.own->tokens.push_back(draws_.wish(size_t(row.draws)).drafts.back());
      row.n_tokens = 1;
      return false;
    });
  }

  const std::shared_ptr<DraftModel> model_;
  RoundTime time_;
  DraftDraws draws_;
  std::vector<DraftWish*> begun_;
  std::vector<Row> rows_;
  DraftStep step_;
};

// Rows of so many tokens, of all layers and heads, as one block.
KvLayout flat_layout(const DraftModel& model, int n_tokens) {
  return {.shape = model.memory->layout().shape, .order = KvOrder::layer_major, .block_tokens = n_tokens, .n_blocks = 1};
}

// Copies the rows of tokens [begin, end) between the memory and `flat`; which way `in` says.
void copy_rows(const DraftModel& model, KvHandle kv, int begin, int end, const KvView& flat, bool in) {
  const KvView own = model.memory->view(kv);
  std::vector<Copy> copies;
  const KvRegion region{begin, end, 0, flat.layout->shape.n_layers};
  add_copies(in ? flat : own, in ? own : flat, region, copies);
  for (const Copy& copy : copies) std::memcpy(copy.destination, copy.source, copy.bytes);
}

}  // namespace

size_t draft_row_words(const DraftModel& model, int n_tokens) {
  return (flat_layout(model, n_tokens).pool_bytes() + sizeof(uint64_t) - 1) / sizeof(uint64_t);
}

std::vector<uint64_t> draft_rows(DraftModel& model, std::span<const int32_t> tokens, uint64_t salt) {
  KvMemory& memory = *model.memory;
  const int n = int(tokens.size());
  if (n > model.model->config().max_position) return {};
  const auto reserved = memory.reserve(tokens, salt);
  if (!reserved) return {};
  const KvHandle kv = reserved.value().handle;
  std::vector<uint64_t> rows;
  int done = reserved.value().cached_tokens;
  if (memory.append(kv, n - done)) {
    DraftStep step;
    for (int end; done < n; done = end) {
      end = std::min(n, done + model.step_tokens);
      const auto next = tokens.subspan(size_t(done), size_t(end - done));
      step.clear();
      step.add(next, end, kv, false);
      step.forward(*model.model, memory);
      memory.written(kv, next);
    }
    rows.resize(draft_row_words(model, n));
    const KvLayout layout = flat_layout(model, n);
    copy_rows(model, kv, 0, n, {reinterpret_cast<std::byte*>(rows.data()), &layout}, false);
  }
  memory.free(kv);
  return rows;
}

std::unique_ptr<DraftMemory> adopt_draft_rows(std::shared_ptr<DraftModel> model, std::span<const int32_t> tokens,
                                              uint64_t salt, std::span<const uint64_t> rows) {
  KvMemory& memory = *model->memory;
  const int n = int(tokens.size());
  const auto reserved = memory.reserve(tokens, salt);
  if (!reserved) return nullptr;
  auto own = std::make_unique<ModelDrafts>(model);
  own->kv = reserved.value().handle;
  const int cached = reserved.value().cached_tokens;
  if (!memory.append(own->kv, n - cached)) return nullptr;
  const KvLayout layout = flat_layout(*model, n);
  const KvView flat{const_cast<std::byte*>(reinterpret_cast<const std::byte*>(rows.data())), &layout};
  copy_rows(*model, own->kv, cached, n, flat, true);
  memory.written(own->kv, tokens.subspan(size_t(cached)));
  own->tokens.assign(tokens.begin(), tokens.end());
  return own;
}

std::unique_ptr<Drafter> make_model_drafter(const SpeculationOptions& options, const DrafterParts& parts) {
  return std::make_unique<ModelDrafter>(options.model, parts.clock);
}

}  // namespace xpyd::batch

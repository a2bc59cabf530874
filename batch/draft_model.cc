#include "batch/draft_model.h"

#include <algorithm>

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
    ids_.clear(), offsets_.assign(1, 0), lengths_.clear(), views_.clear(), logit_rows_.clear();
    for (const Row& row : rows_) {
      ids_.insert(ids_.end(), row.own->tokens.end() - row.n_tokens, row.own->tokens.end());
      offsets_.push_back(int(ids_.size()));
      lengths_.push_back(int(row.own->tokens.size()));
      views_.push_back(model_->memory->view(row.own->kv));
      if (row.draws >= 0) logit_rows_.push_back(offsets_.back() - 1);
    }
    const size_t vocab = size_t(model_->model->config().vocab);
    logits_.resize(logit_rows_.size() * vocab);
    model_->model->forward({.token_ids = ids_,
                            .q_offsets = offsets_,
                            .kv_lengths = lengths_,
                            .views = views_,
                            .logit_rows = logit_rows_},
                           logits_.data());
    const float* logits = logits_.data();
    std::erase_if(rows_, [&](Row& row) {
      if (row.draws < 0) return true;
      draws_.draw(size_t(row.draws), {logits, vocab});
      logits += vocab;
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
  std::vector<int32_t> ids_, offsets_, lengths_, logit_rows_;
  std::vector<KvView> views_;
  std::vector<float> logits_;
};

}  // namespace

std::unique_ptr<Drafter> make_model_drafter(const SpeculationOptions& options, const DrafterParts& parts) {
  return std::make_unique<ModelDrafter>(options.model, parts.clock);
}

}  // namespace xpyd::batch

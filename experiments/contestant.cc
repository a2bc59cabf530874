#include "experiments/contestant.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "allocator/kv_pool.h"
#include "allocator/offload/offloaded_memory.h"
#include "allocator/schemes.h"
#include "base/random.h"
#include "experiments/tally.h"

namespace xpyd::experiments {

int Contestant::ended() const { return sink_->ended; }
uint64_t Contestant::logits_hash() const { return sink_->logits_hash; }
const std::vector<int32_t>& Contestant::last_answer() const { return sink_->last_tokens; }
std::string Contestant::wrong() const { return sink_->wrong; }

Result<std::unique_ptr<Contestant>> Contestant::create(const std::string& scheme, Model& model, const KvOptions& kv,
                                                       const EngineOptions& options) {
  std::unique_ptr<Contestant> made(new Contestant);
  if (Result<KvLayout> layout = plan_pool(scheme, kv); !layout) return layout.error();
  Result<std::shared_ptr<KvPool>> pool = make_block_pool(scheme, kv);
  if (!pool) return pool.error();
  const KvScheme& row = *find_kv_scheme(scheme);
  made->name = scheme;
  made->pool_ = pool.value();
  made->block_bytes_ = row.block_bytes(kv);
  made->memory_ = row.make(made->pool_, kv);
  if (kv.tiers.on()) {
    Result<std::unique_ptr<KvMemory>> tiered = make_offloaded(std::move(made->memory_), kv);
    if (!tiered) return tiered.error();
    made->memory_ = std::move(tiered).value();
  }
  made->engine_ = std::make_unique<Engine>(model, *made->memory_, options, made->clock_, nullptr);
  made->sink_ = std::make_shared<Tally>();
  return made;
}

SequencePtr Contestant::make(std::vector<int32_t> prompt, int max_tokens) {
  auto request = std::make_shared<Request>();
  request->id = next_id_++;
  request->prompt = std::move(prompt);
  request->sampling = sampling;
  request->max_tokens = max_tokens;
  request->ignore_eos = true;
  request->arrival_s = clock_.now();
  return make_sequence(request, {.stands_for = request->n}, sink_, std::make_shared<std::atomic<bool>>(false), nullptr);
}

void Contestant::submit(std::vector<int32_t> prompt, int max_tokens) {
  engine_->submit(make(std::move(prompt), max_tokens));
}

bool Contestant::adopt(std::vector<int32_t> prompt, int max_tokens, const KvView& source) {
  const int there = int(prompt.size()) - 1;
  Result<KvReservation> reserved = memory_->reserve(prompt, 0);
  if (!reserved) return false;
  const KvHandle handle = reserved.value().handle;
  constexpr int kStep = 16;  // small, because vAttention maps as much again ahead
  for (int done = 0, n; done < there; done += n) {
    n = std::min(kStep, there - done);
    if (!memory_->append(handle, n)) {
      memory_->free(handle);
      return false;
    }
    const KvView view = memory_->view(handle);
    const KvShape& shape = view.layout->shape;
    for (int layer = 0; layer < shape.n_layers; ++layer)
      for (int kv = 0; kv < 2; ++kv)
        for (int t = done; t < done + n; ++t)
          for (int h = 0; h < shape.n_kv_heads; ++h)
            std::memcpy(view.row(layer, kv, t, h), source.row(layer, kv, t, h), shape.row_bytes());
    memory_->commit(handle, std::span<const int32_t>(prompt).subspan(size_t(done), size_t(n)));
  }
  SequencePtr sequence = make(std::move(prompt), max_tokens);
  sequence->kv = handle;
  sequence->computed = there;
  engine_->adopt(std::move(sequence));
  return true;
}

double Contestant::step() {
  const double start = clock_.now();
  XPYD_CHECK(engine_->step(), "the engine makes no progress");
  return clock_.now() - start;
}

void Contestant::scramble(uint64_t seed) {
  Random random(seed);
  std::vector<KvHandle> handles;
  const int32_t token = 0;
  for (;;) {
    Result<KvReservation> reserved = memory_->reserve({&token, 1}, 0);
    if (!reserved) break;
    handles.push_back(reserved.value().handle);
    if (!memory_->append(handles.back(), 1)) break;
  }
  for (size_t i = handles.size(); i > 0; --i) {
    std::swap(handles[i - 1], handles[random.below(i)]);
    memory_->free(handles[i - 1]);
  }
}

std::string compare(const std::vector<std::unique_ptr<Contestant>>& contestants) {
  for (const auto& c : contestants) {
    if (std::string wrong = c->wrong(); !wrong.empty()) return c->name + ": " + wrong;
    if (c->ended() != contestants[0]->ended() || c->logits_hash() != contestants[0]->logits_hash())
      return "the logits of " + c->name + " differ from those of " + contestants[0]->name;
  }
  return "";
}

}  // namespace xpyd::experiments

// Tests the demo model's multi-token prediction head against PyTorch with the same weights (experiments/demo_model).
#include <fstream>
#include <nlohmann/json.hpp>

#include "allocator/kv_memory.h"
#include "model/folder.h"
#include "model/model.h"
#include "model/weights/weights.h"
#include "tests/catch.h"

namespace xpyd::testing::predict_test {

struct Head {
  ModelConfig config;
  ThreadTeam team{1};
  std::unique_ptr<Model> model;
  std::unique_ptr<KvMemory> memory;
  Head() {
    config = load_model_config(kDemoModel).value();
    REQUIRE(predict_next_tokens(config).ok());
    model = make_llama(load_weights(kDemoModel, config, {}, team).value(), team, 512, 8);
    KvOptions kv;
    kv.shape = kv_shape(config, Dtype::f32);
    kv.pool_bytes = 1024 * kv.shape.token_bytes();
    kv.max_sequence_tokens = 1024;
    memory = find_kv_scheme("paged")->make(make_block_pool("paged", kv).value(), kv);
  }
  int argmax(const float* logits) const { return int(std::max_element(logits, logits + config.vocab) - logits); }
};

// Runs the prompt in pieces of `piece` tokens. Hidden states carry over from one piece to the next.
void check_prompt(Head& head, const nlohmann::json& golden, int piece) {
  const std::vector<int32_t> ids = golden["ids"];
  const size_t width = size_t(head.config.hidden), n = ids.size();
  const KvHandle kv = head.memory->reserve(ids, 0).value().handle;
  std::vector<float> logits(8 * size_t(head.config.vocab)), states(n * width), before;
  int next = -1;
  for (size_t at = 0; at < n; at += size_t(piece)) {
    const auto tokens = std::span(ids).subspan(at, std::min(size_t(piece), n - at));
    REQUIRE(head.memory->append(kv, int(tokens.size())));
    const std::vector<int32_t> offsets = {0, int(tokens.size())}, lengths = {int(at + tokens.size())};
    const std::vector<int32_t> rows = {int(tokens.size()) - 1};
    const std::vector<KvView> views = {head.memory->view(kv)};
    const std::vector<const float*> previous = {before.empty() ? nullptr : before.data()};
    compute_step(*head.model,
                 {.token_ids = tokens,
                  .q_offsets = offsets,
                  .kv_lengths = lengths,
                  .views = views,
                  .logit_rows = rows,
                  .hidden = {states.data() + at * width, previous}},
                 logits.data());
    head.memory->commit(kv, tokens);
    before.assign(states.begin() + ptrdiff_t((at + tokens.size() - 1) * width),
                  states.begin() + ptrdiff_t((at + tokens.size()) * width));
    next = head.argmax(logits.data());
  }
  CHECK(next == golden["next"]);

  // Predicts after one token whose KV up to the head's layer is already there. For tokens of the prompt the step wrote
  // it.
  const auto predict = [&](int32_t token, int length, const float* state, float* out) {
    const std::vector<int32_t> one = {token}, offsets = {0, 1}, lengths = {length};
    const std::vector<KvView> views = {head.memory->view(kv)};
    const std::vector<const float*> previous = {state};
    std::vector<float> own(width);
    head.model->predict({.token_ids = one,
                         .q_offsets = offsets,
                         .kv_lengths = lengths,
                         .views = views,
                         .hidden = {own.data(), previous}},
                        out);
    return own;
  };
  REQUIRE(head.memory->append(kv, 5));
  const std::vector<int> argmax = golden["argmax"];
  std::vector<float> row(size_t(head.config.vocab));
  for (size_t p = 0; p < n; ++p) {
    predict(ids[p], int(p) + 1, p == 0 ? nullptr : states.data() + (p - 1) * width, row.data());
    CAPTURE(p);
    CHECK(head.argmax(row.data()) == argmax[p]);
    for (const auto& [position, token, value] : golden["logits"].get<std::vector<std::tuple<size_t, size_t, float>>>())
      if (position == p) CHECK(std::abs(row[token] - value) < 2e-3f);
  }
  std::vector<float> state = before;
  int32_t token = next;
  std::vector<int32_t> drafts;
  for (int i = 0; i < 4; ++i) {
    state = predict(token, int(n) + i + 1, state.data(), row.data());
    drafts.push_back(token = head.argmax(row.data()));
  }
  CHECK(drafts == golden["drafts"].get<std::vector<int32_t>>());
  head.memory->free(kv);
}

TEST_CASE("mtp: the demo model's head agrees with PyTorch, however the prompt is cut", "[mtp]") {
  Head head;
  std::ifstream file("tests/model/golden_mtp.json");
  REQUIRE(file);
  const nlohmann::json golden = nlohmann::json::parse(file);
  REQUIRE(golden.size() == 3);
  for (const auto& prompt : golden)
    for (int piece : {512, 7, 1}) {
      CAPTURE(piece);
      check_prompt(head, prompt, piece);
    }
}

TEST_CASE("mtp: a folder without a head is an error that names the missing field", "[mtp]") {
  ModelConfig config = load_model_config(data_path("models/llama2")).value();
  CHECK(predict_next_tokens(config).error().message.find("num_nextn_predict_layers") != std::string::npos);
}

}  // namespace xpyd::testing::predict_test

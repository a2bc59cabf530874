// Tests mixtures of experts: the choice, the logits of both families against double precision, their bits however the
// step is cut, what is read and refused, and what a step costs.
#include <cmath>
#include <set>

#include "model/gemm/gemm.h"
#include "model/moe/router.h"
#include "model/weights/weights.h"
#include "tests/json.h"
#include "tests/matchers.h"
#include "tests/model/llama_cases.h"
#include "tests/model/moe_model.h"

namespace xpyd::testing::moe_test {

const std::vector<std::string> kFamilies = {"mixtral", "qwen3_moe"};

std::vector<int32_t> prompt_of(int n) {
  std::vector<int32_t> prompt;
  for (int i = 0; i < n; ++i) prompt.push_back((i * i * 5 + 11 * i + 3) % MoeModel::kVocab);
  return prompt;
}

TEST_CASE("moe: the highest scores are used, the lower id of equal ones, and ids stay distinct beside NaN", "[moe]") {
  const float nan = std::nanf("");
  const std::tuple<std::vector<float>, int, std::vector<int>> cases[] = {
      {{1, 5, 3, 4}, 2, {1, 3}},      {{2, 2, 2, 2}, 3, {0, 1, 2}},
      {{0, 7, 7, 7}, 2, {1, 2}},      {{-1, -2, -3}, 1, {0}},
      {{3, 1, 2}, 3, {0, 1, 2}},      {{nan, nan, nan, nan}, 2, {0, 1}},
      {{1, nan, 9, 2, 8}, 2, {0, 1}}, {{-INFINITY, 1, INFINITY}, 2, {1, 2}}};
  for (const auto& [scores, used, expected] : cases) {
    std::vector<int> chosen(static_cast<size_t>(used));
    top_experts(scores.data(), int(scores.size()), used, chosen.data());
    CAPTURE(scores, used);
    if (!std::isnan(scores[1])) CHECK(chosen == expected);
    CHECK(std::set<int>(chosen.begin(), chosen.end()).size() == size_t(used));
  }
}

TEST_CASE("moe: rows are grouped by expert, and each token has its own in ascending order", "[moe]") {
  const Experts experts{.count = 6, .used = 3};
  constexpr int kTokens = 40;
  ThreadTeam threads(2);
  RowTeam team(threads, default_gemm(), 1, 1);
  ExpertRows rows(experts, kTokens);
  Random random(4);
  for (int n : {1, 7, kTokens}) {
    std::vector<float> scores(size_t(n) * 6);
    for (float& s : scores) s = float(random.below(4));  // many ties
    const std::vector<float> given = scores;
    rows.choose(scores.data(), n, team);
    int total = 0;
    for (int e = 0; e < 6; ++e) {
      CHECK(rows.of(e).begin == total);
      total = rows.of(e).end;
      for (int r = rows.of(e).begin + 1; r < total; ++r) CHECK(rows.token(r - 1) < rows.token(r));
    }
    CHECK(total == 3 * n);
    for (int t = 0; t < n; ++t) {
      double sum = 0;
      for (int j = 0; j < 3; ++j) {
        const int e = rows.expert(t, j), row = rows.row(t, j);
        CHECK((j == 0 || rows.expert(t, j - 1) < e));
        CHECK((rows.of(e).begin <= row && row < rows.of(e).end && rows.token(row) == t));
        sum += double(rows.weight(t, j));
        for (int other = 0; other < 6; ++other) {
          const bool taken = other == rows.expert(t, 0) || other == rows.expert(t, 1) || other == rows.expert(t, 2);
          const float mine = given[size_t(6 * t + e)], its = given[size_t(6 * t + other)];
          CHECK((taken || its < mine || (its == mine && other > e)));
        }
      }
      CHECK(sum == Approx(1).epsilon(1e-6));
    }
  }
  float odd[] = {9, 8, 7, 1, NAN, 2};  // of an expert that is not used
  rows.choose(odd, 1, team);
  for (int j = 0; j < 3; ++j) CHECK(std::isnan(rows.weight(0, j)));
}

TEST_CASE("moe: logits agree with double precision for both families, whatever the folder's dtype", "[moe][model]") {
  const std::tuple<const char*, LoadOptions> dtypes[] = {
      {"F32", {}}, {"BF16", {}}, {"F16", {}}, {"BF16", {.dtype = Dtype::bf16}}, {"F16", {.weight_dtype = Dtype::f16}}};
  for (const std::string& family : kFamilies)
    for (const bool renormalise : {true, false})
      for (const auto& [dtype, options] : dtypes) {
        if (!renormalise && (family == "mixtral" || dtype != std::string("F32"))) continue;
        CAPTURE(family, dtype, renormalise);
        MoeModel folder(family, dtype);
        if (!renormalise) folder.config["norm_topk_prob"] = false;
        LoadedModel loaded(folder.write(), options);
        loaded.model = make_llama(loaded.weights, loaded.team, 64, 64, {.gemm = &default_gemm(true)});
        const auto tokens = prompt_of(40);
        // The bound of the dense families (llama_test.cc): the logits have unit variance. Measured 1e-6 to 3e-6.
        CHECK(largest_difference(run_prompt(*loaded.model, tokens, 64), folder.logits(tokens)) < 2e-5);
      }
}

TEST_CASE("moe: the bits of a row do not depend on the tokens beside it, or on threads", "[moe][model]") {
  for (const std::string& family : kFamilies)
    for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::int8, Dtype::int4}) {
      CAPTURE(family, dtype_name(dtype));
      MoeModel folder(family);
      const LoadOptions options{.weight_dtype = dtype, .weight_group = 16};
      LoadedModel one(folder.write(), options), three(folder.dir.path, options, 3);
      const auto tokens = prompt_of(50);
      const auto whole = run_prompt(*one.model, tokens, 64);
      for (int chunk : {1, 3, 7, 16, 49})
        CHECK(same_bits(run_prompt(chunk % 3 ? *three.model : *one.model, tokens, chunk), whole));
    }
}

}  // namespace xpyd::testing::moe_test

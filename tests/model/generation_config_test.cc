// What generation_config.json says of sampling.
#include "model/generation_config.h"

#include <fstream>

#include "model/folder.h"
#include "tests/matchers.h"
#include "tests/model/model_fixture.h"

namespace xpyd::testing::generation_config_test {
namespace {

TEST_CASE("generation config: what it says is the default, what it does not say stays", "[model][config]") {
  TempDir dir;
  const auto load = [&](const std::string& text) {
    std::ofstream(dir.path + "/generation_config.json") << text;
    return load_generation_config(dir.path);
  };
  CHECK(describe_defaults(need(load_generation_config(dir.path))) == "");  // no such file
  CHECK(describe_defaults(need(load_generation_config(kDemoModel))) == "");
  CHECK(describe_defaults(need(load("{}"))) == "");
  // Llama 3 Instruct's, and Qwen2.5 Instruct's.
  CHECK(describe_defaults(need(load(R"({"bos_token_id":1,"do_sample":true,"temperature":0.6,"top_p":0.9})"))) ==
        "temperature 0.6, top_p 0.9");
  const SamplingParams qwen = need(
      load(R"({"do_sample":true,"repetition_penalty":1.05,"temperature":0.7,"top_p":0.8,"top_k":20,"min_p":0.125})"));
  CHECK((qwen.temperature == 0.7f && qwen.top_p == 0.8f && qwen.top_k == 20 && qwen.min_p == 0.125f));
  CHECK(qwen.repetition_penalty == 1.05f);
  CHECK(describe_defaults(qwen) == "temperature 0.7, top_k 20, top_p 0.8, min_p 0.125, repetition_penalty 1.05");
  // Whoever does not sample is greedy, whatever temperature stands there.
  CHECK(need(load(R"({"do_sample":false})")).temperature == 0);
  CHECK(need(load(R"({"do_sample":false,"temperature":0.7})")).temperature == 0);
  CHECK(need(load(R"({"temperature":null,"top_k":-1,"do_sample":null})")).temperature == 1);
  for (const std::string field : {R"("temperature":-1)", R"("temperature":"hot")", R"("top_p":0)", R"("top_p":2)",
                                  R"("top_k":1.5)", R"("repetition_penalty":0)", R"("min_p":3)", R"("do_sample":1)"}) {
    INFO(field);
    const auto wrong = load("{" + field + "}");
    REQUIRE_FALSE(wrong);
    CHECK_THAT(wrong.error().message, Contains("generation_config.json"));
    CHECK_THAT(wrong.error().message, Contains(field.substr(1, field.find('"', 1) - 1)));
  }
  REQUIRE_FALSE(load("[]"));
}

}  // namespace
}  // namespace xpyd::testing::generation_config_test

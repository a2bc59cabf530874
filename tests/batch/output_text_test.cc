// The text of an output: whole UTF-8, and stop strings. Rules of single tokens through whole clusters: the output obeys
// them, and is the same with drafts, on one instance or two, and with logprobs.
#include "batch/output_text.h"

#include <algorithm>

#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::output_text_test {
namespace {

// One token a byte, with the byte as its id: byte-level BPE without merges, the smallest tokenizer that can split UTF-8
// and stop strings anywhere. Byte-level vocabularies write byte b as a printable character (GPT-2's table).
const Tokenizer& byte_tokenizer() {
  static const auto tokenizer = [] {
    std::string vocab;
    int shifted = 256;
    for (int byte = 0; byte < 256; ++byte) {
      bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
      char name[32];
      std::snprintf(name, sizeof name, "%s\"\\u%04x\":%d", byte ? "," : "", unsigned(printable ? byte : shifted++),
                    byte);
      vocab += name;
    }
    std::string json = R"({"added_tokens":[],"normalizer":null,"post_processor":null,
      "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
      "decoder":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
      "model":{"type":"BPE","merges":[],"vocab":{)" +
                       vocab + "}}}";
    return Tokenizer::parse(json, "bytes").value();
  }();
  return *tokenizer;
}

struct Fed {
  std::vector<std::string> pieces;
  std::string all;
  const std::string* stop = nullptr;
};

Fed feed(const std::string& text, const Request& request, bool may_stop = true) {
  OutputText output(&byte_tokenizer(), request);
  Fed fed;
  for (unsigned char byte : text) {
    OutputText::Piece piece = output.feed(int32_t(byte), request, may_stop);
    fed.pieces.push_back(piece.text);
    fed.all += piece.text;
    if (piece.stop) {
      fed.stop = piece.stop;
      return fed;
    }
  }
  fed.all += output.flush();
  return fed;
}

TEST_CASE("text passes at once, and UTF-8 characters pass only whole", "[batch]") {
  Request request;
  Fed fed = feed("a\xc3\xa9z", request);
  CHECK(fed.pieces == std::vector<std::string>{"a", "", "\xc3\xa9", "z"});
  CHECK(feed("a\xe2\x82", request).all == "a\xef\xbf\xbd");
}

TEST_CASE("a stop string that forms over several tokens is held back and cut", "[batch]") {
  Request request;
  request.stop = {"STOP", "\n\n"};
  Fed fed = feed("ab STxSTO STOPcd", request);
  CHECK(fed.all == "ab STxSTO ");
  REQUIRE(fed.stop);
  CHECK(*fed.stop == "STOP");
  CHECK(fed.pieces[4] == "");  // "T" of "ST" may still become STOP
  CHECK(feed("x\n\ny", request).all == "x");
  CHECK(feed("ends with STO", request).all == "ends with STO");
  request.include_stop_text = true;
  CHECK(feed("ab STOPcd", request).all == "ab STOP");
  CHECK(feed("ab STOPcd", request, false).all == "ab STOPcd");
}

TEST_CASE("stop strings may overlap themselves and each other", "[batch]") {
  Request request;
  request.stop = {"aab", "abc"};
  CHECK(feed("xaaab", request).all == "xa");
  CHECK(feed("xabc", request).all == "x");
  CHECK(feed("aaaaaa", request).all == "aaaaaa");
  request.stop = {"\xc3\xa9!"};  // its first character is not split when it is held back
  Fed fed = feed("\xc3\xa9?\xc3\xa9!", request);
  CHECK(fed.all == "\xc3\xa9?");
}

struct Case {
  const char* what;
  TokenRules rules;
  std::vector<int32_t> stops = {};
  int min_tokens = 0;
};

std::vector<Case> cases() {
  TokenRules few{.allowed = {3, 4, 5, 6, 7}};
  TokenRules biased{.bias = {{11, 30}, {12, 29.5f}}};
  TokenRules no_pairs{.allowed = {3, 4, 5}, .bad_words = {{{3, 3}}, {{4, 4}}, {{5, 5}}}};
  std::vector<int32_t> most;  // three tokens of four end a text
  for (int32_t id = 0; id < 96; ++id)
    if (id % 4 != 0) most.push_back(id);
  TokenRules longer{.end_tokens = most, .min_tokens = 12};
  return {{"allowed", few}, {"biased", biased}, {"bad words", no_pairs}, {"at least", longer, most, 12}};
}

struct Outcome {
  std::vector<std::vector<int32_t>> tokens;
  std::vector<FinishReason> finishes;
  int64_t accepted = 0;
  bool operator==(const Outcome& o) const { return tokens == o.tokens && finishes == o.finishes; }
};

Outcome run(const TinySetup& setup, const Case& c, float temperature, int top_logprobs) {
  TinyCluster tiny(setup);
  uint64_t id = 0;
  for (const auto& prompt : ragged_prompts()) {
    auto request = tiny_request(id, prompt, 24);
    request->sampling.temperature = temperature;
    request->sampling.seed = id;
    request->sampling.top_logprobs = top_logprobs;
    request->sampling.rules = std::make_shared<TokenRules>(c.rules);
    request->stop_token_ids = c.stops;
    request->min_tokens = c.min_tokens;
    request->n = 1 + int(id % 2);
    REQUIRE(tiny.submit(request).ok());
    ++id;
  }
  tiny.run();
  Outcome out;
  for (uint64_t i = 0; i < id; ++i)
    for (int choice = 0; choice <= int(i % 2); ++choice) {
      out.tokens.push_back(tiny.recorder->choice(i, choice).tokens);
      out.finishes.push_back(tiny.recorder->choice(i, choice).finish);
    }
  for (const InstanceStats& stats : tiny.cluster->stats().instances) out.accepted += stats.accepted_tokens;
  return out;
}

void check_obeys(const Case& c, const Outcome& out) {
  const auto& rules = c.rules;
  for (size_t i = 0; i < out.tokens.size(); ++i) {
    const std::vector<int32_t>& tokens = out.tokens[i];
    CAPTURE(i, tokens);
    REQUIRE(!tokens.empty());
    for (size_t at = 0; at < tokens.size(); ++at) {
      if (!rules.allowed.empty()) CHECK(std::ranges::count(rules.allowed, tokens[at]) == 1);
      if (!rules.bias.empty()) CHECK((tokens[at] == 11 || tokens[at] == 12));
      if (!rules.bad_words.empty() && at > 0) CHECK(tokens[at] != tokens[at - 1]);
    }
    if (c.min_tokens == 0) continue;
    // No end token is among the first ones, and the text ends with the first one after them.
    const auto first = std::ranges::find_if(tokens, [&](int32_t t) { return std::ranges::count(c.stops, t) > 0; });
    CHECK(first - tokens.begin() >= c.min_tokens);
    if (first != tokens.end()) CHECK(first + 1 == tokens.end());
    CHECK(out.finishes[i] == (first == tokens.end() ? FinishReason::length : FinishReason::stop));
  }
}

TEST_CASE("rules: outputs obey the rules of tokens, whatever runs them", "[batch][sampler]") {
  int64_t accepted = 0;
  for (const Case& c : cases())
    for (const float temperature : {0.0f, 1.0f}) {
      const Outcome plain = run({.topology = "1C"}, c, temperature, -1);
      INFO(c.what << ", temperature " << temperature);
      check_obeys(c, plain);
      if (c.min_tokens > 0) CHECK(std::ranges::count(plain.finishes, FinishReason::stop) > 0);
      for (const char* topology : {"1C", "1P1D"})
        for (const bool drafts : {false, true}) {
          TinySetup setup{.topology = topology};
          if (drafts) setup.speculation = {find_drafter("ngram"), 4};
          INFO(setup.describe());
          const Outcome other = run(setup, c, temperature, drafts ? -1 : 2);
          CHECK(other == plain);
          accepted += other.accepted;
        }
    }
  CHECK(accepted > 100);
}

}  // namespace
}  // namespace xpyd::testing::output_text_test

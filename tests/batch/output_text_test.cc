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

Fed feed(const std::string& text, const Request& request) {
  OutputText output(&byte_tokenizer(), request);
  Fed fed;
  for (unsigned char byte : text) {
    OutputText::Piece piece = output.feed(int32_t(byte), request);
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

}  // namespace
}  // namespace xpyd::testing::output_text_test

// The text of an output: whole UTF-8, and stop strings.
#include "batch/output_text.h"

#include "tests/catch.h"
#include "tests/server/server_fixture.h"

namespace xpyd::testing::output_text_test {

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

}  // namespace xpyd::testing::output_text_test

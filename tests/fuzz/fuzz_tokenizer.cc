// libFuzzer: the input up to its first NUL byte is a tokenizer.json, and the rest is a text for it. Whatever loads must
// encode any text, and decode its ids the same at once and as a stream.
#include <cstdint>
#include <string_view>

#include "base/utf8.h"
#include "model/text/tokenizer.h"

using namespace xpyd;
using namespace xpyd::testing;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) try {
  std::string_view input(reinterpret_cast<const char*>(data), size);
  size_t json_bytes = std::min(input.find('\0'), size);
  std::string_view text = input.substr(std::min(json_bytes + 1, size));
  auto loaded = Tokenizer::parse(input.substr(0, json_bytes), "fuzz.json");
  if (!loaded.ok()) {
    XPYD_CHECK(loaded.error().message.starts_with("fuzz.json: "));
    return 0;
  }
  const Tokenizer& tokenizer = *loaded.value();
  if (text.empty()) text = input.substr(0, 200);
  for (bool parse_special : {true, false}) {
    const Tokenizer::Part part{text, parse_special};
    std::vector<int32_t> ids = tokenizer.encode(std::span(&part, 1), true);
    for (int32_t id : ids) XPYD_CHECK(id >= 0 && id < tokenizer.vocab_size());
    ids.push_back(static_cast<int32_t>(size) - 100);  // may be no valid token
    for (uint8_t byte : text.substr(0, 50)) ids.push_back(byte);
    for (bool skip : {true, false}) {
      Detokenizer detokenizer(tokenizer, skip);
      std::string streamed;
      for (int32_t id : ids) {
        std::string piece = detokenizer.feed(id);
        XPYD_CHECK(is_utf8(piece));
        streamed += piece;
      }
      streamed += detokenizer.flush();
      XPYD_CHECK(is_utf8(streamed) && streamed == tokenizer.decode(ids, skip));
    }
  }
  size_t cut = text.size() / 2;
  Tokenizer::Part parts[] = {{text.substr(0, cut), true}, {text.substr(cut), false}};
  tokenizer.encode(parts, true);
  return 0;
} catch (const Error& error) {  // a regex that takes too long
  XPYD_CHECK(error.message.starts_with("fuzz.json: "));
  return 0;
}

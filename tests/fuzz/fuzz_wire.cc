// Feeds bytes as a peer may send them to handshake, frames and messages. No input may crash, hang, or be accepted as
// something that no member sent. The first byte chooses what is fuzzed, and the second how the input is cut.
//
// Messages matter most, because everything that a handshake or a frame lets in was made with the key. So their bytes
// are fuzzed directly, and not behind an authentication code.

#include <cstdint>
#include <string>

#include "disagg/messages.h"
#include "disagg/net/frames.h"
#include "disagg/net/hello.h"
#include "disagg/processes/codec.h"

namespace xpyd::testing {
namespace {

constexpr double kNow = 1000;

// A message that is accepted is complete: it can be encoded again, with the same meaning.
void fuzz_message(uint16_t type, std::string_view payload) {
  Result<Envelope> got = decode(type, payload, kNow);
  if (!got) {
    XPYD_CHECK(!got.error().message.empty());
    return;
  }
  std::string again = encode(got.value().from, got.value().to, got.value().message, kNow);
  Result<Envelope> second = decode(type, again, kNow);
  XPYD_CHECK(second.ok(), second.ok() ? "" : second.error().message);
  XPYD_CHECK(second.value().message.index() == got.value().message.index());
}

// Without the key no frame is accepted, however the input is cut.
void fuzz_frames(std::string_view input, size_t step) {
  FrameReader reader(SipKey{0x0123456789abcdef, 0xfedcba9876543210});
  Status status = ok();
  while (!input.empty() && status) {
    size_t n = std::min(step, input.size());
    status = reader.feed(input.substr(0, n), [](uint16_t, std::string_view) {
      XPYD_CHECK(false, "a forged frame");
      return true;
    });
    input.remove_prefix(n);
  }
  XPYD_CHECK(reader.buffered_bytes() <= kMaxFramePayloadBytes + kFrameOverheadBytes);
}

void fuzz_handshake(Handshake::Side side, std::string_view input, size_t step) {
  static const ClusterKey key = ClusterKey::random();
  Handshake handshake(side, key, {"P0", 1});
  std::string out;
  Status status = ok();
  size_t taken = 0;
  while (status) {
    std::string_view piece = input.substr(0, std::min(step, input.size()));
    size_t before = piece.size();
    status = handshake.feed(piece, out);
    taken += before - piece.size();
    input.remove_prefix(before - piece.size());
    XPYD_CHECK(!handshake.done(), "without the key");
    XPYD_CHECK(out.size() <= 512 && taken <= kMaxHandshakeBytes + step);
    if (input.empty()) break;
    XPYD_CHECK(!status || before > piece.size(), "no progress");
  }
}

}  // namespace
}  // namespace xpyd::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace xpyd;
  using namespace xpyd::testing;
  if (size < 2) return 0;
  std::string_view input(reinterpret_cast<const char*>(data + 2), size - 2);
  const size_t step = data[1] == 0 ? size : data[1];
  switch (data[0]) {
    case 0: fuzz_frames(input, step); break;
    case 2: fuzz_handshake(Handshake::Side::initiator, input, step); break;
    case 3: fuzz_handshake(Handshake::Side::acceptor, input, step); break;
    default: fuzz_message(uint16_t(12 + data[0] % 24), input);
  }
  return 0;
}

// One direction of an authenticated channel: messages as frames, and back.
//
//   u32 length   of the payload
//   u16 type     0 to 15: the channel's own; from 16: the codec's
//   u16 flags    0
//   u64 sequence 0, 1, 2, … in each direction
//   payload
//   u64 mac      SipHash-2-4 of everything before it, with a key of this direction of this session
//
// A frame that is changed, injected, repeated, left out or reordered ends the channel. SipHash was made as a MAC for
// short messages and takes 0.1 us, less than a truncated HMAC. A forger has one try a session, of probability 2^-64.
//
// Thread safety: each object belongs to one thread, or is guarded by its owner.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/siphash.h"
#include "base/status.h"

namespace xpyd::disagg {

inline constexpr size_t kFrameHeaderBytes = 16, kFrameMacBytes = 8;
inline constexpr size_t kFrameOverheadBytes = kFrameHeaderBytes + kFrameMacBytes;
inline constexpr size_t kMaxFramePayloadBytes = 16u << 20;  // a prompt of 4M tokens

class FrameWriter {
 public:
  explicit FrameWriter(const SipKey& key) : key_(key) {}
  // Appends one frame. Requires: the payload has at most kMaxFramePayloadBytes.
  void append(std::string& out, uint16_t type, std::string_view payload);

 private:
  SipKey key_;
  uint64_t sequence_ = 0;
};

// Turns bytes from a socket into frames. It holds at most one frame. Its memory grows with the bytes received, not with
// the length that a frame claims.
class FrameReader {
 public:
  explicit FrameReader(const SipKey& key, size_t max_payload_bytes = kMaxFramePayloadBytes)
      : key_(key), max_payload_bytes_(max_payload_bytes) {}
  // Calls on_frame(type, payload) for each whole frame until on_frame returns false. `payload` is valid during the
  // call. After an error every call returns the same error.
  using OnFrame = std::function<bool(uint16_t type, std::string_view payload)>;
  Status feed(std::string_view bytes, const OnFrame& on_frame);
  size_t buffered_bytes() const { return buffer_.size(); }

 private:
  Result<size_t> one_frame(std::string_view bytes, const OnFrame& on_frame, bool* go_on);

  SipKey key_;
  size_t max_payload_bytes_;
  uint64_t sequence_ = 0;
  std::string buffer_;
  Status status_ = ok();
};

}  // namespace xpyd::disagg

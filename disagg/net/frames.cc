#include "disagg/net/frames.h"

#include <cstring>

namespace xpyd::disagg {
namespace {

constexpr size_t kKeptFrameBytes = 1u << 20;  // kept between two frames

struct FrameHeader {
  uint32_t length;
  uint16_t type, flags;
  uint64_t sequence;
};
static_assert(sizeof(FrameHeader) == kFrameHeaderBytes);

}  // namespace

void FrameWriter::append(std::string& out, uint16_t type, std::string_view payload) {
  XPYD_CHECK(payload.size() <= kMaxFramePayloadBytes, std::to_string(payload.size()));
  FrameHeader header{uint32_t(payload.size()), type, 0, sequence_++};
  size_t begin = out.size();
  out.append(reinterpret_cast<const char*>(&header), sizeof header);
  out.append(payload);
  uint64_t mac = siphash(key_, std::string_view(out).substr(begin));
  out.append(reinterpret_cast<const char*>(&mac), sizeof mac);
}

// Returns the bytes consumed; 0 if the frame is not complete yet.
Result<size_t> FrameReader::one_frame(std::string_view bytes, const OnFrame& on_frame, bool* go_on) {
  auto bad = [&](const std::string& why) {
    return Error{ErrorCode::io, "frame " + std::to_string(sequence_) + ": " + why};
  };
  if (bytes.size() < kFrameHeaderBytes) return size_t{0};
  FrameHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  // Checked before the MAC: a forged length must not make the reader wait for gigabytes.
  if (header.length > max_payload_bytes_)
    return bad("its length is " + std::to_string(header.length) + " bytes; expected at most " +
               std::to_string(max_payload_bytes_));
  if (header.sequence != sequence_) return bad("its sequence number is " + std::to_string(header.sequence));
  if (header.flags != 0) return bad("its flags are unknown");
  size_t whole = kFrameOverheadBytes + header.length;
  if (bytes.size() < whole) return size_t{0};
  uint64_t mac;
  std::memcpy(&mac, bytes.data() + whole - kFrameMacBytes, sizeof mac);
  if (mac != siphash(key_, bytes.substr(0, whole - kFrameMacBytes)))
    return bad("its authentication code is wrong: it was changed on the way, or does not come from our peer");
  ++sequence_;
  *go_on = on_frame(header.type, bytes.substr(kFrameHeaderBytes, header.length));
  return whole;
}

Status FrameReader::feed(std::string_view bytes, const OnFrame& on_frame) {
  if (!status_) return status_;
  // Whole frames are read in place. Only a partial frame is copied.
  bool joined = !buffer_.empty();
  if (joined) {
    buffer_.append(bytes);
    bytes = buffer_;
  }
  bool go_on = true;
  while (go_on) {
    Result<size_t> used = one_frame(bytes, on_frame, &go_on);
    if (!used) {
      buffer_ = std::string();
      status_ = used.error();
      return status_;
    }
    if (used.value() == 0) break;
    bytes.remove_prefix(used.value());
  }
  if (joined)
    buffer_.erase(0, buffer_.size() - bytes.size());
  else
    buffer_.assign(bytes);
  if (buffer_.empty() && buffer_.capacity() > kKeptFrameBytes) buffer_ = std::string();
  return ok();
}

}  // namespace xpyd::disagg

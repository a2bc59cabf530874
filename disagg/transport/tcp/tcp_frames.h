// The bytes of the tcp wire behind the hello (bootstrap.h). Little-endian structs as they lie in memory.
//
//   poster -> owner   frames: write (table, payload, seal), read (table), abandon
//   owner -> poster   data (payload) for a read, and for every frame a placed, which says what
//                     became of it
//
// A post is cut into frames of at most kFrameBytes, which any connection of a session carries. The
// owner counts a post as arrived when it has placed all its frames; abandon says that no more than
// `n_frames` will come, of a post that was given up. One that is given up in the middle of a frame
// ends in zeros, as its length was promised: then the seal is zero as well, and it does not count.
//
// TcpReader is the half that reads: heads pass through a buffer of fixed size, payload goes where
// it belongs. What does not follow the rules ends the connection, with a reason.
//
// Thread safety: a reader belongs to one thread.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "disagg/transport/registration_table.h"

namespace xpyd::disagg::tcp {

constexpr uint64_t kTcpVersion = 0x3430'7063'7464'7978;  // "xydtcp04": NodeIdentity::schema
constexpr size_t kFrameBytes = 1 << 20;                  // payload
constexpr int kFrameRanges = 1024;                       // IOV_MAX

constexpr uint64_t kFrameSeal = 0x6c61'6573'6c61'6573;  // "sealseal"

enum class FrameType : uint8_t { write = 1, read, abandon, data, placed };
enum class FrameStatus : uint8_t { placed, arrived, refused };  // arrived: and the post is whole

struct FrameHead {
  uint32_t magic = kMagic;
  FrameType type = FrameType::write;
  FrameStatus status = FrameStatus::placed;
  uint16_t n_ranges = 0;
  uint64_t post = 0;  // of the session
  uint32_t frame = 0, n_frames = 0;
  RemoteKey registration;
  uint64_t bytes = 0;                              // payload; read: that it asks for
  static constexpr uint32_t kMagic = 0x3276'6b78;  // "xkv2"
};
static_assert(sizeof(FrameHead) == 48 && sizeof(AddressRange) == 16);

class TcpReader {
 public:
  virtual ~TcpReader() = default;
  enum class Outcome { again, would_block, ended };

  // Reads once with `read(iovec*, n)` -> bytes, 0 (nothing there now) or -1 (ended), and obeys what
  // is whole. `ended`: reason() says why, if it was the other side's fault.
  template <class Read>
  Outcome pump(Read read);
  const char* reason() const { return reason_; }

 protected:
  TcpReader() = default;
  // The next `need` bytes, contiguous. Says how many it needs after these, or sets a payload.
  virtual void on_head(std::span<const std::byte> bytes) = 0;
  // Around each read into payload_: false: it may not go there, and is dropped.
  virtual bool enter_payload() = 0;
  virtual void leave_payload() = 0;
  virtual void on_payload() = 0;  // all of it has been read

  void need_head(size_t bytes) { need_ = bytes; }
  void need_payload(size_t bytes) {
    payload_left_ = bytes, payload_at_ = 0;
    in_payload_ = true;
  }
  void fail(const char* reason) { reason_ = reason_ ? reason_ : reason; }
  std::vector<iovec> payload_;  // where it goes; the reader moves along it. Empty: it is dropped

 private:
  bool obey();  // what the buffer holds; false: it has failed
  void advance(size_t bytes);
  void end_payload_if_read();
  static constexpr size_t kBuffer = 32 << 10;  // the largest table, and some
  std::vector<std::byte> buffer_ = std::vector<std::byte>(kBuffer);
  std::vector<std::byte> dropped_;
  std::vector<iovec> where_;
  size_t begin_ = 0, end_ = 0, need_ = sizeof(FrameHead);
  bool in_payload_ = false;
  size_t payload_left_ = 0, payload_at_ = 0;  // at: the first of payload_ that is not full
  const char* reason_ = nullptr;
};

// The posts of one poster that have come in part, over all its connections.
class InboundSession {
 public:
  InboundSession(PeerId peer, RegistrationTable& registrations) : peer_(peer), registrations_(registrations) {}
  PeerId peer() const { return peer_; }
  // A frame is dealt with; `placed`: not refused. What to answer; nothing: too many posts.
  bool frame_done(const FrameHead& head, KvOp op, bool placed, FrameStatus& status);
  bool abandoned(const FrameHead& head);

 private:
  struct Transfer {
    uint32_t seen = 0, expected = 0;
    bool refused = false;
  };
  static constexpr size_t kMaxPosts = 1 << 16;
  const PeerId peer_;
  RegistrationTable& registrations_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, Transfer> posts_;
};

// The owner's reader of one connection. Its answers collect in answers(), in order.
class InboundReader final : public TcpReader {
 public:
  InboundReader(RegistrationTable& registrations, std::shared_ptr<InboundSession> session)
      : registrations_(registrations), session_(std::move(session)) {}

  // Bytes to send; then, for data, the ranges of the owner's memory that follow them.
  struct Answer {
    std::vector<std::byte> bytes;
    FrameHead asked;            // data: the read
    std::vector<iovec> ranges;  // data: what to send, while the window lets us
    bool refused = false;       // data: zeros are sent instead
  };
  std::vector<Answer>& answers() { return answers_; }
  PeerId peer() const { return session_->peer(); }
  void answer(const FrameHead& asked, KvOp op, bool placed);

 private:
  void on_head(std::span<const std::byte> bytes) override;
  void on_frame(const FrameHead& head);
  void on_table(std::span<const std::byte> bytes);
  bool enter_payload() override;
  void leave_payload() override { registrations_.leave(head_.registration, false); }
  void on_payload() override;

  RegistrationTable& registrations_;
  const std::shared_ptr<InboundSession> session_;
  std::vector<Answer> answers_;
  FrameHead head_;
  enum class Next { head, table, seal } next_ = Next::head;
  bool allowed_ = false;  // every piece of this frame's payload so far
};

inline void TcpReader::advance(size_t bytes) {
  payload_left_ -= bytes;
  if (payload_.empty()) return;  // it is dropped, wherever it was meant to go
  while (bytes > 0) {
    iovec& to = payload_[payload_at_];
    const size_t n = std::min(bytes, to.iov_len);
    to.iov_base = static_cast<char*>(to.iov_base) + n;
    to.iov_len -= n, bytes -= n;
    if (to.iov_len == 0) ++payload_at_;
  }
}

template <class Read>
TcpReader::Outcome TcpReader::pump(Read read) {
  if (reason_) return Outcome::ended;
  if (begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_, begin_ = 0;
  }
  // Payload first, and in the same call the head that follows it. (The buffer is empty then.)
  where_.clear();
  const size_t payload = in_payload_ ? payload_left_ : 0;
  bool entered = false;
  if (payload > 0 && (entered = enter_payload())) {
    for (size_t i = payload_at_; i < payload_.size() && where_.size() + 1 < kFrameRanges; ++i)
      where_.push_back(payload_[i]);
  } else if (payload > 0) {
    if (dropped_.empty()) dropped_.resize(64 << 10);
    for (size_t left = payload; left > 0;) {
      where_.push_back({dropped_.data(), std::min(left, dropped_.size())});
      left -= where_.back().iov_len;
    }
  }
  size_t room = 0;
  for (const iovec& v : where_) room += v.iov_len;
  if (room == payload) where_.push_back({buffer_.data() + end_, buffer_.size() - end_});
  const ssize_t n = read(where_.data(), int(where_.size()));
  if (entered) leave_payload();
  if (n == 0) return Outcome::would_block;
  if (n < 0) return Outcome::ended;
  const size_t into_payload = std::min(size_t(n), payload);
  if (into_payload > 0) advance(into_payload);
  end_ += size_t(n) - into_payload;
  return obey() ? Outcome::again : Outcome::ended;
}

}  // namespace xpyd::disagg::tcp

// The frames of the tcp transport, which follow the handshake of bootstrap.h on each connection. Heads and tables are
// little-endian structs, as they lie in memory.
//
//   initiator -> owner   write (head, table, payload, seal), read (head, table), abandon (head)
//   owner -> initiator   data (head, payload) for an allowed read; placed (head), the status of a write or read
//
// A transfer (`Transfer`) is cut into frames of at most kFrameBytes, and each frame may take any connection of the
// initiator's session. The owner counts a transfer as arrived when it has placed all of its frames. An abandon says
// that only `n_frames` frames of a transfer come. If the initiator gives up in the middle of a frame, it fills the
// promised length with zeros. The seal is then wrong, so the owner refuses the frame.
//
// TcpReader is the receiving half of a connection. It reads heads and tables into a buffer of fixed size and payload
// directly into its destination. An invalid frame ends the connection.
//
// Thread safety: a reader belongs to one thread. InboundSession: any thread.
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

constexpr size_t kFrameBytes = 1 << 20;  // largest payload of a frame
constexpr int kFrameRanges = 1024;       // most entries of one call: IOV_MAX; cut() leaves two free

constexpr uint64_t kFrameSeal = 0x6c61'6573'6c61'6573;  // "sealseal"

enum class FrameType : uint8_t { write = 1, read, abandon, data, placed };
enum class FrameStatus : uint8_t { placed, arrived, refused };  // arrived: placed, and the transfer is complete

// The part of a remote key that a registration table asks for.
struct FrameKey {
  uint32_t index = 0, generation = 0;
  uint64_t secret = 0;
  FrameKey() = default;
  FrameKey(const RemoteKey& key) : index(key.index), generation(key.generation), secret(key.secret) {}
  operator RemoteKey() const { return {index, generation, secret}; }
};

struct FrameHead {
  uint32_t magic = kMagic;
  FrameType type = FrameType::write;
  FrameStatus status = FrameStatus::placed;
  uint16_t n_ranges = 0;
  uint64_t post = 0;  // number of the transfer in its session
  uint32_t frame = 0, n_frames = 0;
  FrameKey registration;
  uint64_t bytes = 0;                              // of the payload; read: of the payload it asks for
  static constexpr uint32_t kMagic = 0x3276'6b78;  // "xkv2"
};
static_assert(sizeof(FrameHead) == 48 && sizeof(AddressRange) == 16);

class TcpReader {
 public:
  virtual ~TcpReader() = default;
  enum class Outcome { again, would_block, ended };

  // Calls `read(iovec*, n)` once and handles what is complete. `read` returns the number of bytes, 0 if none are there
  // now, or -1 if the connection has ended. After `ended`, reason() names the peer's mistake, if it made one.
  template <class Read>
  Outcome pump(Read read);
  const char* reason() const { return reason_; }

 protected:
  TcpReader() = default;
  // Gets the next contiguous bytes, as many as were asked for. Calls need_head() or need_payload() if the next part has
  // another length; fail() ends the connection.
  virtual void on_head(std::span<const std::byte> bytes) = 0;
  // Called before a read into payload_. If it returns false, the bytes are read and dropped; otherwise leave_payload()
  // follows the read.
  virtual bool enter_payload() = 0;
  virtual void leave_payload() = 0;
  virtual void on_payload() = 0;  // the whole payload has been read

  void need_head(size_t bytes) { need_ = bytes; }
  void need_payload(size_t bytes) {
    payload_left_ = bytes, payload_at_ = 0;
    in_payload_ = true;
  }
  void fail(const char* reason) { reason_ = reason_ ? reason_ : reason; }
  std::vector<iovec> payload_;  // rest of the payload's destination; empty: the payload is dropped

 private:
  bool obey();  // handles what buffer_ holds; false after fail()
  void advance(size_t bytes);
  void end_payload_if_read();
  static constexpr size_t kBuffer = 32 << 10;  // twice the largest table
  std::vector<std::byte> buffer_ = std::vector<std::byte>(kBuffer);
  std::vector<std::byte> dropped_;
  std::vector<iovec> where_;
  size_t begin_ = 0, end_ = 0, need_ = sizeof(FrameHead);
  bool in_payload_ = false;
  size_t payload_left_ = 0, payload_at_ = 0;  // bytes; index of the first entry of payload_ that is not full
  const char* reason_ = nullptr;
};

// The transfers of one initiator that have arrived in part, over all connections of its session.
class InboundSession {
 public:
  InboundSession(PeerId peer, RegistrationTable& registrations) : peer_(peer), registrations_(registrations) {}
  PeerId peer() const { return peer_; }
  // Counts a frame of a transfer. `placed` is false if the frame was refused. Sets `status` for the answer. Returns
  // false if too many transfers of this session are incomplete.
  bool frame_done(const FrameHead& head, KvOp op, bool placed, FrameStatus& status);
  bool abandoned(const FrameHead& head);  // handles an abandon; false as for frame_done()

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

// The owner's reader of one connection. It collects the answers to the frames in answers(), in order. The link sends
// them, and calls answer() when the data of a read has been sent.
class InboundReader final : public TcpReader {
 public:
  InboundReader(RegistrationTable& registrations, std::shared_ptr<InboundSession> session)
      : registrations_(registrations), session_(std::move(session)) {}

  // A placed, or a data with the ranges of the owner's memory to send behind its head.
  struct Answer {
    std::vector<std::byte> bytes;  // the head
    FrameHead asked;               // data: the read that it answers
    std::vector<iovec> ranges;     // data: what to send while the registration is open
    bool refused = false;          // data: zeros are sent instead
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
  bool allowed_ = false;  // the registration has allowed every piece of this frame so far
};

inline void TcpReader::advance(size_t bytes) {
  payload_left_ -= bytes;
  if (payload_.empty()) return;  // a dropped payload
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
  // One call reads the rest of the payload and, behind it, the next head. buffer_ is empty while a payload is read.
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

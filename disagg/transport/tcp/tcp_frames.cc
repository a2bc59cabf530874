#include "disagg/transport/tcp/tcp_frames.h"

#include <algorithm>

namespace xpyd::disagg::tcp {
namespace {

template <class T>
T load(std::span<const std::byte> bytes, size_t at = 0) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

template <class T>
void append(std::vector<std::byte>& out, const T& value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof value);
}

}  // namespace

void TcpReader::end_payload_if_read() {
  if (!in_payload_ || payload_left_ > 0) return;
  in_payload_ = false;
  on_payload();
}

bool TcpReader::obey() {
  end_payload_if_read();
  while (!reason_) {
    const size_t have = end_ - begin_;
    if (in_payload_) {  // the first bytes of the payload came into the buffer with its head
      const size_t n = std::min(have, payload_left_);
      if (n > 0) {
        const bool entered = enter_payload();
        for (size_t left = n, at = begin_; entered && left > 0;) {
          iovec& to = payload_[payload_at_];
          const size_t part = std::min(left, to.iov_len);
          std::memcpy(to.iov_base, buffer_.data() + at, part);
          left -= part, at += part;
          advance(part);
        }
        if (entered)
          leave_payload();
        else
          advance(n);
        begin_ += n;
      }
      if (payload_left_ > 0) return true;
      end_payload_if_read();
    } else if (have >= need_) {
      const size_t head = need_;
      on_head({buffer_.data() + begin_, head});
      begin_ += head;
      end_payload_if_read();
    } else {
      return true;
    }
  }
  return false;
}

bool InboundSession::frame_done(const FrameHead& head, KvOp op, bool placed, FrameStatus& status) {
  status = placed ? FrameStatus::placed : FrameStatus::refused;
  bool whole = placed && head.n_frames == 1;
  if (head.n_frames > 1) {
    std::lock_guard lock(mutex_);
    auto at = posts_.find(head.post);
    if (at == posts_.end()) {
      if (posts_.size() == kMaxPosts) return false;
      at = posts_.emplace(head.post, Transfer{0, head.n_frames, false}).first;
    }
    Transfer& post = at->second;
    post.refused |= !placed;
    if (++post.seen >= post.expected) {
      whole = !post.refused && post.expected == head.n_frames;
      posts_.erase(at);
    }
  }
  if (!whole) return true;
  const bool counted = registrations_.enter(head.registration, peer_, op, std::span<const Copy>()) &&
                       registrations_.leave(head.registration, true);
  status = counted ? FrameStatus::arrived : FrameStatus::refused;
  return true;
}

bool InboundSession::abandoned(const FrameHead& head) {
  std::lock_guard lock(mutex_);
  auto at = posts_.find(head.post);
  if (at == posts_.end()) {
    if (posts_.size() == kMaxPosts) return false;
    at = posts_.emplace(head.post, Transfer{}).first;
  }
  at->second.refused = true;
  at->second.expected = head.n_frames;
  if (at->second.seen >= at->second.expected) posts_.erase(at);
  return true;
}

void InboundReader::on_head(std::span<const std::byte> bytes) {
  switch (std::exchange(next_, Next::head)) {
    case Next::head: return on_frame(load<FrameHead>(bytes));
    case Next::table: return on_table(bytes);
    case Next::seal:
      need_head(sizeof(FrameHead));
      return answer(head_, KvOp::write, allowed_ && load<uint64_t>(bytes) == kFrameSeal);
  }
}

void InboundReader::on_frame(const FrameHead& head) {
  head_ = head;
  if (head.magic != FrameHead::kMagic) return fail("a frame has a wrong magic number");
  if (head.type == FrameType::abandon) {
    if (!session_->abandoned(head)) return fail("there are too many unfinished transfers");
    return need_head(sizeof(FrameHead));
  }
  if (head.type != FrameType::write && head.type != FrameType::read) return fail("a frame has an unexpected type");
  if (head.n_ranges > kFrameRanges || head.bytes > kFrameBytes) return fail("a frame is too large");
  if (head.frame >= head.n_frames) return fail("a frame's number exceeds its transfer's number of frames");
  next_ = Next::table;
  need_head(head.n_ranges * sizeof(AddressRange));
}

void InboundReader::on_table(std::span<const std::byte> bytes) {
  need_head(sizeof(FrameHead));
  const KvOp op = head_.type == FrameType::write ? KvOp::write : KvOp::read;
  std::vector<Copy> pieces;
  std::vector<iovec> where;
  uint64_t total = 0;
  for (size_t i = 0; i < head_.n_ranges; ++i) {
    const auto range = load<AddressRange>(bytes, i * sizeof(AddressRange));
    if (range.bytes == 0 || range.bytes > kFrameBytes) return fail("a range is too large or empty");
    total += range.bytes;
    auto* at = reinterpret_cast<std::byte*>(uintptr_t(range.begin));
    pieces.push_back({at, at, range.bytes});
    where.push_back({at, range.bytes});
  }
  if (total != head_.bytes) return fail("the ranges of a frame do not sum to its bytes");
  // The ranges of a registration do not change, so later pieces of this frame only ask whether it is still open.
  allowed_ = registrations_.enter(head_.registration, session_->peer(), op, pieces);
  if (allowed_) registrations_.leave(head_.registration, false);
  if (op == KvOp::write) {
    if (!allowed_) where.clear();  // the registration does not allow these addresses: the payload is dropped
    payload_ = std::move(where);
    return need_payload(total);
  }
  if (!allowed_) return answer(head_, op, false);
  Answer data;
  FrameHead head{
      .type = FrameType::data, .post = head_.post, .frame = head_.frame, .n_frames = head_.n_frames, .bytes = total};
  append(data.bytes, head);
  data.asked = head_;
  data.ranges = std::move(where);
  answers_.push_back(std::move(data));
}

bool InboundReader::enter_payload() {
  allowed_ = allowed_ &&
             registrations_.enter(head_.registration, session_->peer(), KvOp::write, std::span<const Copy>());
  return allowed_;
}

void InboundReader::on_payload() {
  next_ = Next::seal;
  need_head(sizeof kFrameSeal);
}

void InboundReader::answer(const FrameHead& asked, KvOp op, bool placed) {
  FrameHead head{.type = FrameType::placed, .post = asked.post, .frame = asked.frame, .n_frames = asked.n_frames};
  if (!session_->frame_done(asked, op, placed, head.status)) return fail("there are too many unfinished transfers");
  Answer out;
  append(out.bytes, head);
  answers_.push_back(std::move(out));
}

}  // namespace xpyd::disagg::tcp

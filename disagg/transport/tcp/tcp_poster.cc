#include "disagg/transport/tcp/tcp_poster.h"

#include <algorithm>
#include <cstring>

namespace xpyd::disagg::tcp {
namespace {

constexpr size_t kSendRanges = kFrameRanges - 2;

class AnswerReader final : public TcpReader {
 public:
  explicit AnswerReader(PosterSession& session) : session_(session) {}

 private:
  void on_head(std::span<const std::byte> bytes) override {
    FrameHead head;
    std::memcpy(&head, bytes.data(), sizeof head);
    if (head.magic != FrameHead::kMagic) return fail("an answer has a wrong magic number");
    if (head.type == FrameType::placed) return session_.answered(head);
    if (head.type != FrameType::data || head.bytes > kFrameBytes) return fail("an answer has an unexpected type");
    payload_.clear();
    post_ = session_.find(head.post);
    if (post_) {  // the destination comes from the own read, never from the owner's answer
      if (post_->what.op != KvOp::read || head.frame >= post_->frames.size() ||
          post_->frames[head.frame].bytes != head.bytes)
        return fail("data came that was not requested");
      const Frame& frame = post_->frames[head.frame];
      for (const Copy& copy : std::span(post_->copies).subspan(frame.first, frame.n))
        payload_.push_back({copy.destination, copy.bytes});
    }
    need_payload(head.bytes);
  }
  bool enter_payload() override { return post_ && session_.enter(*post_); }
  void leave_payload() override { session_.leave(*post_); }
  void on_payload() override { post_.reset(); }

  PosterSession& session_;
  std::shared_ptr<Transfer> post_;  // the read whose data is arriving
};

class PosterLink final : public Link {
 public:
  PosterLink(Fd socket, std::shared_ptr<PosterSession> session)
      : Link(std::move(socket)), session_(std::move(session)), reader_(*session_) {}
  ~PosterLink() override { session_->give_up(); }  // the loss of one connection ends the session

  Next run() override {
    if (session_->dead()) return Next::close;
    bool more = true;
    for (int turn = 0; turn < kTurn && more; ++turn) {
      const auto outcome = reader_.pump([this](iovec* where, int n) { return read_now(fd(), where, n); });
      if (outcome == TcpReader::Outcome::ended) return Next::close;
      more = outcome == TcpReader::Outcome::again;
    }
    bool unsent = true;
    for (int turn = 0; turn < kTurn && unsent; ++turn) {
      if (head_.empty() && data_.empty() && !next()) break;
      from_.clear();
      head_.append_to(from_);
      const bool has_data = !data_.empty();
      const bool entered = has_data && !zeros_ && session_->enter(*post_);
      if (has_data && !entered && !std::exchange(zeros_, true)) data_.become_zeros();
      data_.append_to(from_);
      const ssize_t n = send_now(fd(), from_);
      if (entered) session_->leave(*post_);
      if (n < 0) return Next::close;
      size_t sent = size_t(n);
      head_.advance(sent);
      data_.advance(sent);
      unsent = n > 0;
      more |= unsent && turn + 1 == kTurn;
    }
    return more ? Next::again : Next::wait;
  }

 private:
  bool next() {
    FrameHead head;
    head_bytes_.clear();
    post_.reset();
    if (!session_->next_control(head)) {
      uint32_t number = 0;
      post_ = session_->next_frame(number);
      if (!post_) return false;
      const Frame& frame = post_->frames[number];
      const bool write = post_->what.op == KvOp::write;
      head = {.type = write ? FrameType::write : FrameType::read,
              .n_ranges = uint16_t(frame.n),
              .post = post_->id,
              .frame = number,
              .n_frames = uint32_t(post_->frames.size()),
              .registration = post_->what.registration,
              .bytes = frame.bytes};
      std::vector<iovec> rows;
      ranges_.clear();
      for (const Copy& copy : std::span(post_->copies).subspan(frame.first, frame.n)) {
        const std::byte* there = write ? copy.destination : copy.source;
        ranges_.push_back({reinterpret_cast<uintptr_t>(there), copy.bytes});
        if (write) rows.push_back({const_cast<std::byte*>(copy.source), copy.bytes});
      }
      if (write) rows.push_back({&seal_, sizeof seal_});
      data_.set(std::move(rows));
    }
    zeros_ = false;
    const auto* bytes = reinterpret_cast<const std::byte*>(&head);
    head_bytes_.assign(bytes, bytes + sizeof head);
    if (head.n_ranges > 0) {
      bytes = reinterpret_cast<const std::byte*>(ranges_.data());
      head_bytes_.insert(head_bytes_.end(), bytes, bytes + ranges_.size() * sizeof(AddressRange));
    }
    head_.set({{head_bytes_.data(), head_bytes_.size()}});
    return true;
  }

  const std::shared_ptr<PosterSession> session_;
  AnswerReader reader_;
  std::shared_ptr<Transfer> post_;  // the transfer whose frame is being sent
  std::vector<std::byte> head_bytes_;
  std::vector<AddressRange> ranges_;
  std::vector<iovec> from_;
  uint64_t seal_ = kFrameSeal;
  Sending head_, data_;
  bool zeros_ = false;  // the transfer was given up in the middle of this frame
};

}  // namespace

void cut(const TransferPlan& plan, Transfer& post) {
  post.frames.emplace_back();
  post.copies.reserve(plan.copies.size() + plan.bytes / kFrameBytes + 1);
  for (Copy copy : plan.copies) {
    while (copy.bytes > 0) {
      if (post.frames.back().bytes == kFrameBytes || post.frames.back().n == kSendRanges)
        post.frames.push_back({post.copies.size(), 0, 0});
      Frame& frame = post.frames.back();
      const size_t n = std::min(copy.bytes, kFrameBytes - frame.bytes);
      post.copies.push_back({copy.source, copy.destination, n});
      frame.bytes += n, ++frame.n;
      copy.source += n, copy.destination += n, copy.bytes -= n;
    }
  }
}

std::unique_ptr<Link> make_poster_link(Fd socket, std::shared_ptr<PosterSession> session) {
  return std::make_unique<PosterLink>(std::move(socket), std::move(session));
}

}  // namespace xpyd::disagg::tcp

#include "disagg/transport/tcp_owner.h"

#include <deque>

namespace xpyd::tcp {
namespace {

constexpr int kMaxLinks = 4096;      // connections to one owner
constexpr size_t kMaxAnswers = 256;  // of a link, unsent: then nothing more is read

class OwnerLink final : public Link {
 public:
  OwnerLink(Fd socket, Host& host, std::shared_ptr<InboundSession> session)
      : Link(std::move(socket)), host_(host), reader_(host.windows, std::move(session)) {
    ++host_.links;
  }
  ~OwnerLink() override { --host_.links; }

  Next run() override {
    if (!flush()) return Next::close;
    for (int turn = 0; turn < kTurn; ++turn) {
      if (answers_.size() > kMaxAnswers) return Next::wait;  // for room in the socket
      const auto outcome = reader_.pump([this](iovec* where, int n) { return read_now(fd(), where, n); });
      for (auto& answer : reader_.answers()) answers_.push_back({std::move(answer), {}, {}, false});
      reader_.answers().clear();
      if (!flush()) return Next::close;
      if (reader_.reason()) host_.windows.count_refused();
      if (outcome == TcpReader::Outcome::ended || reader_.reason()) return Next::close;
      if (outcome == TcpReader::Outcome::would_block) return given_up() ? Next::close : Next::wait;
    }
    return given_up() ? Next::close : Next::again;
  }

 private:
  struct Outgoing {
    InboundReader::Answer answer;
    Sending bytes, data;
    bool begun = false;
  };

  // A peer that was disconnected since it came.
  bool given_up() {
    const int disconnects = host_.disconnects;
    if (disconnects == seen_disconnects_) return false;
    seen_disconnects_ = disconnects;
    const bool was_ours = std::exchange(known_, host_.windows.connected(reader_.peer()));
    return was_ours && !known_;
  }

  bool flush() {
    if (!known_) known_ = host_.windows.connected(reader_.peer());
    while (!answers_.empty()) {
      from_.clear();
      bool entered = false;
      Outgoing* last = nullptr;  // with data: nothing goes behind it in this call
      for (Outgoing& out : answers_) {
        if (!std::exchange(out.begun, true)) {
          out.bytes.set({{out.answer.bytes.data(), out.answer.bytes.size()}});
          out.data.set(std::move(out.answer.ranges));
        }
        out.bytes.append_to(from_);
        if (!out.data.empty() || from_.size() >= kMaxAnswers) {
          last = &out;
          break;
        }
      }
      if (last && !last->data.empty()) {
        const FrameHead& asked = last->answer.asked;
        entered = !last->answer.refused &&
                  host_.windows.enter(asked.window, reader_.peer(), KvOp::read, std::span<const Copy>());
        if (!entered && !std::exchange(last->answer.refused, true)) last->data.become_zeros();
        last->data.append_to(from_);
      }
      const ssize_t n = send_now(fd(), from_);
      if (entered) host_.windows.leave(last->answer.asked.window, false);
      if (n < 0) return false;
      if (n == 0) return true;
      for (size_t sent = size_t(n); sent > 0;) {
        Outgoing& out = answers_.front();
        out.bytes.advance(sent);
        out.data.advance(sent);
        if (!out.bytes.empty() || !out.data.empty()) break;
        finish_front();
      }
    }
    return true;
  }

  void finish_front() {
    const InboundReader::Answer answer = std::move(answers_.front().answer);
    answers_.pop_front();
    if (answer.asked.type != FrameType::read) return;
    reader_.answer(answer.asked, KvOp::read, !answer.refused);
    for (auto& more : reader_.answers()) answers_.push_back({std::move(more), {}, {}, false});
    reader_.answers().clear();
  }

  Host& host_;
  InboundReader reader_;
  std::deque<Outgoing> answers_;
  std::vector<iovec> from_;
  bool known_ = false;  // the owner has connected to this peer, too
  int seen_disconnects_ = 0;
};

}  // namespace

std::shared_ptr<InboundSession> Host::session(uint64_t number, PeerId peer) {
  std::lock_guard lock(mutex_);
  std::erase_if(sessions_, [](const auto& entry) { return entry.second.expired(); });
  auto& entry = sessions_[number];
  auto session = entry.lock();
  if (session) return session->peer() == peer ? session : nullptr;
  entry = session = std::make_shared<InboundSession>(peer, windows);
  return session;
}

std::unique_ptr<Link> make_owner_link(Fd socket, Host& host, std::shared_ptr<InboundSession> session) {
  if (host.links >= kMaxLinks) {
    host.windows.count_refused();
    return nullptr;
  }
  return std::make_unique<OwnerLink>(std::move(socket), host, std::move(session));
}

}  // namespace xpyd::tcp

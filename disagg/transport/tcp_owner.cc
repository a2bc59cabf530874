#include "disagg/transport/tcp_owner.h"

#include <sys/socket.h>

#include <cerrno>
#include <deque>

#include "disagg/transport/tcp_socket.h"

namespace xpyd::tcp {
namespace {

constexpr int kMaxLinks = 4096;       // connections to one owner
constexpr size_t kMaxStrangers = 64;  // of them, without a token yet; beyond, the oldest goes
constexpr double kHelloSeconds = 10;
constexpr size_t kMaxAnswers = 256;  // of a link, unsent: then nothing more is read

class OwnerLink final : public Link {
 public:
  OwnerLink(int fd, Host& host) : Link(fd), host_(host), reader_(host.inbound) { ++host_.links; }
  ~OwnerLink() override {
    --host_.links;
    if (stranger_) known_now();
  }

  Next run() override {
    if (!flush()) return Next::close;
    for (int turn = 0; turn < kTurn; ++turn) {
      if (answers_.size() > kMaxAnswers) return Next::wait;  // for room in the socket
      const auto outcome = reader_.pump([this](iovec* where, int n) { return read_now(fd(), where, n); });
      for (auto& answer : reader_.answers()) answers_.push_back({std::move(answer), {}, {}, false});
      reader_.answers().clear();
      if (reader_.session() && std::exchange(stranger_, false)) known_now();
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

  void known_now() {
    std::lock_guard lock(host_.strangers_mutex);
    std::erase(host_.strangers, fd());
  }

  // A stranger that says nothing, or a peer that was disconnected since it came.
  bool given_up() {
    if (!reader_.session()) return clock_.now() > came_s_ + kHelloSeconds;
    const int disconnects = host_.disconnects;
    if (disconnects == seen_disconnects_) return false;
    seen_disconnects_ = disconnects;
    const bool was_ours = std::exchange(known_, host_.windows.connected(reader_.session()->peer()));
    return was_ours && !known_;
  }

  bool flush() {
    if (reader_.session() && !known_) known_ = host_.windows.connected(reader_.session()->peer());
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
                  host_.windows.enter(asked.window, reader_.session()->peer(), KvOp::read, std::span<const Copy>());
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
  RealClock clock_;
  const double came_s_ = clock_.now();
  bool stranger_ = true;
  bool known_ = false;  // the owner has connected to this peer, too
  int seen_disconnects_ = 0;
};

}  // namespace

Link::Next Listener::run() {
  while (true) {
    const int fd = accept4(this->fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
    if (fd < 0) return Next::wait;
    if (host_.links >= kMaxLinks) {
      host_.windows.count_refused();
      ::close(fd);
      continue;
    }
    {
      // Honest peers need a millisecond. Its link closes it, on a thread of its own.
      std::lock_guard lock(host_.strangers_mutex);
      if (host_.strangers.size() >= kMaxStrangers) {
        host_.windows.count_refused();
        shutdown(host_.strangers.front(), SHUT_RDWR);
        host_.strangers.pop_front();
      }
      host_.strangers.push_back(fd);
    }
    prepare(fd);
    next_loop_().add(std::make_unique<OwnerLink>(fd, host_));
  }
}

}  // namespace xpyd::tcp

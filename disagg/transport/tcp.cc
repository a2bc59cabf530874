// tcp: several connections to each peer, over which a post's frames go as each has room. Bytes go
// from the poster's rows into the socket (sendmsg) and from the socket into the owner's rows
// (readv), with no copy of ours in between.
//
// The owner's own thread places every byte, and asks the window before each readv; none blocks. So
// a window is closed at once, whatever the peer does, and nobody reaches memory that it was not
// given. A frame that is refused is read and dropped.
//
// A poster proves itself with the token of the owner's address, which only travels over control
// channels. Whoever holds it may say which instance it is; a window's key holds a secret.
//
// MSG_ZEROCOPY is left out: over loopback it is slower (the kernel copies there all the same), and
// source rows would have to stay until the peer's acknowledgements.

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <deque>

#include "disagg/transport/tcp_frames.h"
#include "disagg/transport/tcp_loop.h"
#include "disagg/transport/wires.h"

namespace xpyd {
namespace {

constexpr int kMaxLinks = 4096;    // connections to one owner
constexpr int kMaxStrangers = 64;  // of them, without a token yet
constexpr double kHelloSeconds = 10;
constexpr int kConnectSeconds = 5;
constexpr size_t kMaxAnswers = 256;  // of a link, unsent: then nothing more is read
constexpr int kTurn = 8;             // reads or writes before another link's turn
constexpr size_t kSendRanges = kFrameRanges - 2;

alignas(64) const std::byte kZeros[64 << 10] = {};

std::string os_text() { return std::strerror(errno); }

ssize_t read_now(int fd, iovec* where, int n) {
  while (true) {
    const ssize_t got = readv(fd, where, n);
    if (got > 0) return got;
    if (got == 0) return -1;
    if (errno == EAGAIN) return 0;
    if (errno != EINTR) return -1;
  }
}

ssize_t send_now(int fd, std::vector<iovec>& from) {
  msghdr message{};
  message.msg_iov = from.data(), message.msg_iovlen = std::min<size_t>(from.size(), kFrameRanges);
  while (true) {
    const ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return sent;
    if (errno == EAGAIN) return 0;
    if (errno != EINTR) return -1;
  }
}

void prepare(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

// What of a list of ranges is still to be sent.
class Sending {
 public:
  void set(std::vector<iovec> ranges) { ranges_ = std::move(ranges), at_ = 0; }
  bool empty() const { return at_ == ranges_.size(); }
  void append_to(std::vector<iovec>& out) const {
    out.insert(out.end(), ranges_.begin() + ptrdiff_t(at_), ranges_.end());
  }
  void advance(size_t& sent) {
    while (sent > 0 && !empty()) {
      iovec& from = ranges_[at_];
      const size_t n = std::min(sent, from.iov_len);
      from.iov_base = static_cast<char*>(from.iov_base) + n;
      from.iov_len -= n, sent -= n;
      at_ += from.iov_len == 0;
    }
  }
  // As many bytes, none of them ours: the other side was promised a length.
  void become_zeros() {
    size_t left = 0;
    for (size_t i = at_; i < ranges_.size(); ++i) left += ranges_[i].iov_len;
    ranges_.clear(), at_ = 0;
    for (; left > 0; left -= ranges_.back().iov_len)
      ranges_.push_back({const_cast<std::byte*>(kZeros), std::min(left, sizeof kZeros)});
  }

 private:
  std::vector<iovec> ranges_;
  size_t at_ = 0;
};

// ---- The owner of memory: connections that peers have made to it.

struct Host {
  Host(std::span<const MemoryRange> regions, const TcpToken& token)
      : windows(regions, true), inbound(regions, windows, token) {}
  void disconnect(PeerId peer) {
    windows.disconnect(peer);
    ++disconnects;
  }
  WindowTable windows;
  InboundHost inbound;
  std::atomic<int> links{0}, strangers{0};
  std::atomic<int> disconnects{0};  // links look whether it was theirs
};

class OwnerLink final : public Link {
 public:
  OwnerLink(int fd, Host& host) : Link(fd), host_(host), reader_(host.inbound) {
    ++host_.links, ++host_.strangers;
  }
  ~OwnerLink() override { --host_.links, host_.strangers -= stranger_; }

  Next run() override {
    if (!flush()) return Next::close;
    for (int turn = 0; turn < kTurn; ++turn) {
      if (answers_.size() > kMaxAnswers) return Next::wait;  // for room in the socket
      const auto outcome =
          reader_.pump([this](iovec* where, int n) { return read_now(fd(), where, n); });
      for (auto& answer : reader_.answers()) answers_.push_back({std::move(answer), {}, {}, false});
      reader_.answers().clear();
      if (reader_.session() && std::exchange(stranger_, false)) --host_.strangers;
      if (!flush()) return Next::close;
      if (reader_.reason()) host_.windows.count_refused();
      if (outcome == FrameReader::Outcome::ended || reader_.reason()) return Next::close;
      if (outcome == FrameReader::Outcome::would_block)
        return given_up() ? Next::close : Next::wait;
    }
    return given_up() ? Next::close : Next::again;
  }

 private:
  struct Outgoing {
    InboundReader::Answer answer;
    Sending bytes, data;
    bool begun = false;
  };

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
        entered =
            !last->answer.refused && host_.windows.enter(asked.window, reader_.session()->peer(),
                                                         KvOp::read, std::span<const Copy>());
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

class Listener final : public Link {
 public:
  Listener(int fd, Host& host, std::function<Loop&()> next_loop)
      : Link(fd), host_(host), next_loop_(std::move(next_loop)) {}
  Next run() override {
    while (true) {
      const int fd = accept4(this->fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
      if (fd < 0) return Next::wait;
      if (host_.links >= kMaxLinks || host_.strangers >= kMaxStrangers) {
        host_.windows.count_refused();
        ::close(fd);
        continue;
      }
      prepare(fd);
      next_loop_().add(std::make_unique<OwnerLink>(fd, host_));
    }
  }

 private:
  Host& host_;
  const std::function<Loop&()> next_loop_;
};

// ---- The poster: its connections to one owner.

struct Frame {
  size_t first = 0, n = 0;  // of Post::copies
  size_t bytes = 0;
};

struct Post {
  uint64_t id = 0;
  KvTransfer what;
  std::vector<Copy> copies;  // none is in two frames
  std::vector<Frame> frames;
  size_t bytes = 0;
  int64_t descriptors = 0;
  // Guarded by the session's mutex.
  uint32_t begun = 0, answered = 0;  // frames
  int inside = 0;                    // links that are in the local rows at this moment
  bool arrived = false, refused = false;
  bool given_up = false;  // nobody goes into the local rows any more
};

class PosterSession {
 public:
  PosterSession(PeerId peer_, const std::string& address_) : peer(peer_), address(address_) {}
  const PeerId peer;
  const std::string address;
  const uint64_t id = random_secret();
  std::vector<TcpRange> regions;  // before the first link
  std::atomic<bool> dead{false};
  std::atomic<int> links{0};

  void add(const std::shared_ptr<Post>& post) {
    std::lock_guard lock(mutex_);
    posts_[post->id] = post;
    unsent_.push_back(post);
  }
  // In flight, or settled and forgotten. `give_up`: it is not wanted any more.
  TransferState poll(Post& post, bool give_up) {
    std::lock_guard lock(mutex_);
    const bool done = post.arrived && post.answered == post.frames.size();
    if (!done && (give_up || post.refused || dead) && !std::exchange(post.given_up, true)) {
      std::erase_if(unsent_, [&](const auto& other) { return other.get() == &post; });
      if (post.begun > 0 && post.begun < post.frames.size())
        control_.push_back({.type = FrameType::abandon, .post = post.id, .n_frames = post.begun});
    }
    if (!done && (!post.given_up || post.inside > 0)) return TransferState::in_flight;
    posts_.erase(post.id);
    return done ? TransferState::done : TransferState::failed;
  }

  // For links: what to send next.
  bool next_control(FrameHead& head) {
    std::lock_guard lock(mutex_);
    if (control_.empty()) return false;
    head = control_.front();
    control_.pop_front();
    return true;
  }
  std::shared_ptr<Post> next_frame(uint32_t& frame) {
    std::lock_guard lock(mutex_);
    if (unsent_.empty()) return nullptr;
    std::shared_ptr<Post> post = unsent_.front();
    frame = post->begun++;
    if (post->begun == post->frames.size()) unsent_.pop_front();
    return post;
  }
  std::shared_ptr<Post> find(uint64_t post) {
    std::lock_guard lock(mutex_);
    auto found = posts_.find(post);
    return found == posts_.end() ? nullptr : found->second;
  }
  bool enter(Post& post) {
    std::lock_guard lock(mutex_);
    if (post.given_up) return false;
    ++post.inside;
    return true;
  }
  void leave(Post& post) {
    std::lock_guard lock(mutex_);
    --post.inside;
  }
  void answered(const FrameHead& head) {
    std::lock_guard lock(mutex_);
    auto found = posts_.find(head.post);
    if (found == posts_.end()) return;
    Post& post = *found->second;
    ++post.answered;
    post.arrived |= head.status == FrameStatus::arrived;
    post.refused |= head.status == FrameStatus::refused;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Post>> posts_;  // not settled
  std::deque<std::shared_ptr<Post>> unsent_;                   // frames of them
  std::deque<FrameHead> control_;
};

class AnswerReader final : public FrameReader {
 public:
  explicit AnswerReader(PosterSession& session)
      : FrameReader(sizeof(FrameHead)), session_(session) {}

 private:
  void on_head(std::span<const std::byte> bytes) override {
    FrameHead head;
    std::memcpy(&head, bytes.data(), sizeof head);
    if (head.magic != FrameHead::kMagic) return fail("an answer does not begin as answers do");
    if (head.type == FrameType::placed) return session_.answered(head);
    if (head.type != FrameType::data || head.bytes > kFrameBytes)
      return fail("an answer of no type that an owner sends");
    payload_.clear();
    post_ = session_.find(head.post);
    if (post_) {  // what was asked for, not what the owner says
      if (post_->what.op != KvOp::read || head.frame >= post_->frames.size() ||
          post_->frames[head.frame].bytes != head.bytes)
        return fail("data that nobody asked for");
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
  std::shared_ptr<Post> post_;  // whose data comes
};

class PosterLink final : public Link {
 public:
  PosterLink(int fd, std::shared_ptr<PosterSession> session)
      : Link(fd), session_(std::move(session)), reader_(*session_) {
    ++session_->links;
  }
  ~PosterLink() override {
    session_->dead = true;  // a session is whole or not at all
    --session_->links;
  }

  Next run() override {
    if (session_->dead) return Next::close;
    bool more = true;
    for (int turn = 0; turn < kTurn && more; ++turn) {
      const auto outcome =
          reader_.pump([this](iovec* where, int n) { return read_now(fd(), where, n); });
      if (outcome == FrameReader::Outcome::ended) return Next::close;
      more = outcome == FrameReader::Outcome::again;
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
              .window = post_->what.window,
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
      head_bytes_.insert(head_bytes_.end(), bytes, bytes + ranges_.size() * sizeof(TcpRange));
    }
    head_.set({{head_bytes_.data(), head_bytes_.size()}});
    return true;
  }

  const std::shared_ptr<PosterSession> session_;
  AnswerReader reader_;
  std::shared_ptr<Post> post_;  // of which a frame is being sent
  std::vector<std::byte> head_bytes_;
  std::vector<TcpRange> ranges_;
  std::vector<iovec> from_;
  uint64_t seal_ = kFrameSeal;
  Sending head_, data_;
  bool zeros_ = false;  // its post was given up in the middle of this frame
};

// ---- Addresses: tcp:HOST:PORT:TOKEN, the token in hexadecimal.

struct Address {
  std::string host, port;
  TcpToken token{};
};

Error unreachable(const std::string& address, const std::string& why) {
  return {ErrorCode::unavailable, "tcp: " + address + ": " + why};
}

Result<Address> parse_address(const std::string& text) {
  const auto bad = [&] {
    return unreachable(text, "not an address of a tcp transport (tcp:HOST:PORT:TOKEN)");
  };
  const size_t token_at = text.rfind(':');
  if (!text.starts_with("tcp:") || token_at <= 4) return bad();
  const size_t port_at = text.rfind(':', token_at - 1);
  if (port_at == std::string::npos || port_at <= 4) return bad();
  Address address{text.substr(4, port_at - 4), text.substr(port_at + 1, token_at - port_at - 1)};
  const std::string token = text.substr(token_at + 1);
  if (token.size() != 2 * address.token.size() || address.port.empty()) return bad();
  for (size_t i = 0; i < address.token.size(); ++i) {
    const char* at = token.data() + 2 * i;
    if (auto [end, error] = std::from_chars(at, at + 2, address.token[i], 16);
        error != std::errc() || end != at + 2)
      return bad();
  }
  if (address.host.size() > 2 && address.host.front() == '[' && address.host.back() == ']')
    address.host = address.host.substr(1, address.host.size() - 2);
  return address;
}

using AddressInfo = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressInfo look_up(const std::string& host, const std::string& port, int flags) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM, hints.ai_flags = AI_NUMERICSERV | flags;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) found = nullptr;
  return {found, freeaddrinfo};
}

bool send_all(int fd, const void* bytes, size_t n) {
  return send(fd, bytes, n, MSG_NOSIGNAL) == ssize_t(n);
}
bool receive_all(int fd, void* bytes, size_t n) {
  return n == 0 || recv(fd, bytes, n, MSG_WAITALL) == ssize_t(n);
}

// One connection, as far as the Welcome; -1: `why`.
int reach(const Address& address, PeerId self, PosterSession& session, std::string& why) {
  constexpr uint64_t kMaxRegions = 4096;
  AddressInfo at = look_up(address.host, address.port, 0);
  why = at ? "it cannot be connected to" : "no such host or port";
  if (!at) return -1;
  const int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval patience{kConnectSeconds, 0}, forever{0, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  const TcpHello hello{kTcpMagic, session.id, address.token, self};
  TcpWelcome welcome;
  std::vector<TcpRange> regions;
  if (fd < 0 || connect(fd, at->ai_addr, at->ai_addrlen) != 0) {
    why = os_text();
  } else if (prepare(fd);
             !send_all(fd, &hello, sizeof hello) || !receive_all(fd, &welcome, sizeof welcome)) {
    why = "it does not let us in";
  } else if (welcome.magic != kTcpMagic || welcome.n_regions > kMaxRegions) {
    why = "it is not this wire, or another version of it";
  } else if (regions.resize(welcome.n_regions);
             !receive_all(fd, regions.data(), regions.size() * sizeof(TcpRange))) {
    why = "its answer broke off";
  } else {
    session.regions = std::move(regions);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &forever, sizeof forever);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &forever, sizeof forever);
    const int blocking = 1;
    if (ioctl(fd, FIONBIO, &blocking) == 0) return fd;
    why = os_text();
  }
  if (fd >= 0) ::close(fd);
  return -1;
}

class TcpTransport final : public KvTransport {
 public:
  TcpTransport(const TransportOptions& options, const TcpToken& token)
      : options_(options), host_(std::span(options_.regions), token) {
    const int cores = int(std::thread::hardware_concurrency());
    const int n = std::clamp(std::min(options.connections, cores / 2), 1, 8);
    for (int i = 0; i < n; ++i) loops_.push_back(std::make_unique<Loop>());
  }
  ~TcpTransport() override {
    for (auto& loop : loops_) loop->stop();
  }

  Status listen(const TcpToken& token) {
    AddressInfo at = look_up(options_.host, "0", AI_NUMERICHOST | AI_PASSIVE);
    if (!at) return invalid("tcp: --host " + options_.host + ": not an IP address of this machine");
    const int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    sockaddr_storage bound{};
    socklen_t length = sizeof bound;
    char port[16], host[128];
    if (fd < 0 || bind(fd, at->ai_addr, at->ai_addrlen) != 0 || ::listen(fd, 512) != 0 ||
        getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length) != 0 ||
        getnameinfo(reinterpret_cast<sockaddr*>(&bound), length, host, sizeof host, port,
                    sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
      const Error error{ErrorCode::unavailable, "tcp: " + options_.host + ": " + os_text()};
      if (fd >= 0) ::close(fd);
      return error;
    }
    const bool v6 = bound.ss_family == AF_INET6;
    address_ = std::string("tcp:") + (v6 ? "[" : "") + host + (v6 ? "]" : "") + ":" + port + ":";
    for (uint8_t byte : token) {
      char hex[3];
      std::snprintf(hex, sizeof hex, "%02x", byte);
      address_ += hex;
    }
    loops_[0]->add(std::make_unique<Listener>(
        fd, host_, [this]() -> Loop& { return *loops_[accepted_++ % loops_.size()]; }));
    return ok();
  }

  std::string address() const override { return address_; }

  Status connect(PeerId peer, const std::string& address) override {
    if (auto known = peers_.find(peer); known != peers_.end() && !known->second->dead) {
      if (known->second->address == address) return ok();
      return invalid("tcp: instance " + std::to_string(peer) + " has another address already");
    }
    auto parsed = parse_address(address);
    if (!parsed.ok()) return parsed.error();
    auto session = std::make_shared<PosterSession>(peer, address);
    std::vector<std::unique_ptr<Link>> links;
    for (int i = 0; i < std::max(1, options_.connections); ++i) {
      std::string why;
      const int fd = reach(parsed.value(), options_.self, *session, why);
      if (fd < 0) return unreachable(address, why);
      links.push_back(std::make_unique<PosterLink>(fd, session));
    }
    for (size_t i = 0; i < links.size(); ++i) loops_[i % loops_.size()]->add(std::move(links[i]));
    peers_[peer] = session;
    host_.windows.connect(peer);
    return ok();
  }
  void disconnect(PeerId peer) override {
    if (auto at = peers_.find(peer); at != peers_.end()) {
      at->second->dead = true;
      peers_.erase(at);
    }
    host_.disconnect(peer);
    kick();
  }
  std::byte* remote(PeerId peer, int region) const override {
    auto found = peers_.find(peer);
    if (found == peers_.end() || size_t(region) >= found->second->regions.size()) return nullptr;
    return reinterpret_cast<std::byte*>(uintptr_t(found->second->regions[size_t(region)].address));
  }

  Result<WindowKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) override {
    return host_.windows.open(peer, op, ranges);
  }
  bool close(const WindowKey& window) override { return host_.windows.close(window); }
  int arrived(const WindowKey& window) const override { return host_.windows.arrived(window); }

  TransferId post(const KvTransfer& what, const TransferPlan& plan) override {
    const TransferId id = ++last_id_;
    ++stats_.posts;
    InFlight& transfer = transfers_[id];
    auto peer = peers_.find(what.peer);
    if (peer == peers_.end() || late(what)) return id;
    transfer.session = peer->second;
    transfer.post = std::make_shared<Post>();
    Post& post = *transfer.post;
    post.id = uint64_t(id), post.what = what, post.bytes = plan.bytes;
    post.descriptors = int64_t(plan.copies.size());
    cut(plan, post);
    transfer.session->add(transfer.post);
    kick();
    return id;
  }

  TransferState poll(TransferId id) override {
    auto at = transfers_.find(id);
    XPYD_CHECK(at != transfers_.end(), "poll of a transfer that is not known");
    TransferState state = TransferState::failed;
    if (Post* post = at->second.post.get()) {
      const bool give_up = at->second.cancelled || late(post->what);
      state = at->second.session->poll(*post, give_up);
      if (give_up && state == TransferState::failed) kick();  // there may be an abandon to send
      if (state == TransferState::in_flight) return state;
      if (state == TransferState::done)
        stats_.bytes += int64_t(post->bytes), stats_.descriptors += post->descriptors;
    }
    stats_.failed += state == TransferState::failed;
    transfers_.erase(at);
    return state;
  }

  void cancel(TransferId id) override {
    if (auto at = transfers_.find(id); at != transfers_.end()) at->second.cancelled = true;
  }
  TransportStats stats() const override {
    TransportStats stats = stats_;
    stats.refused = host_.windows.refused();
    return stats;
  }

 private:
  struct InFlight {
    std::shared_ptr<PosterSession> session;
    std::shared_ptr<Post> post;  // null: it has failed already
    bool cancelled = false;
  };

  bool late(const KvTransfer& what) const {
    return what.deadline_s > 0 && options_.clock->now() >= what.deadline_s;
  }
  void kick() {
    for (auto& loop : loops_) loop->kick();
  }

  static void cut(const TransferPlan& plan, Post& post) {
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

  const TransportOptions options_;
  Host host_;
  std::string address_;
  std::unordered_map<PeerId, std::shared_ptr<PosterSession>> peers_;
  std::unordered_map<TransferId, InFlight> transfers_;
  TransferId last_id_ = 0;
  TransportStats stats_;
  size_t accepted_ = 0;  // of the first loop's thread
  std::vector<std::unique_ptr<Loop>> loops_;
};

}  // namespace

MadeTransport make_tcp_transport(const TransportOptions& options) {
  XPYD_CHECK(options.clock);
  TcpToken token;
  for (size_t half : {0, 1}) {
    const uint64_t random = random_secret();
    std::memcpy(token.data() + 8 * half, &random, sizeof random);
  }
  auto transport = std::make_unique<TcpTransport>(options, token);
  if (Status status = transport->listen(token); !status.ok()) return status.error();
  return std::unique_ptr<KvTransport>(std::move(transport));
}

}  // namespace xpyd

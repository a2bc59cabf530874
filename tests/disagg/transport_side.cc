#include "tests/disagg/transport_side.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <sstream>
#include <tuple>

#include "base/row_hash.h"
#include "experiments/connect_and_wait.h"
#include "tests/catch.h"
#include "tests/disagg/words.h"

extern char** environ;

namespace xpyd::testing {
namespace {

constexpr const char* kPeerTest = "the other process of a transport test";

std::vector<TestedTransport>& registered() {
  static std::vector<TestedTransport> all;
  return all;
}

// Calls run(offset, bytes) for bytes [from, from + bytes) of a pattern, a few KiB at a time.
template <class Run>
void for_pattern(uint64_t seed, size_t from, size_t bytes, Run run) {
  uint64_t words[513];
  for (size_t done = 0; done < bytes;) {
    const size_t first = (from + done) >> 3, skip = (from + done) & 7;
    const size_t n = std::min<size_t>(bytes - done, 4096);
    for (size_t w = 0; w < (skip + n + 7) / 8; ++w) words[w] = mix64(seed * 0x9e3779b97f4a7c15u + first + w);
    run(done, std::span(reinterpret_cast<const std::byte*>(words) + skip, n));
    done += n;
  }
}

class SideHere final : public Side {
 public:
  SideHere(const TestedTransport& transport, PeerId self) {
    for (size_t bytes : kRegionBytes) {
      memory_.push_back(transport.memory(bytes));
      options_.regions.push_back({memory_.back().get(), bytes});
    }
    options_.queue = &cpu_queue();
    options_.clock = &clock_;
    options_.self = self;
    options_.connect_s = 60;
    auto made = transport.make(options_);
    if (!made.ok()) throw std::runtime_error(transport.name + ": " + made.error().message);
    transport_ = std::move(made).value();
  }

  std::string address() override { return transport_->address(); }
  std::string connect(PeerId peer, const std::string& address) override {
    Status status = connect_and_wait(*transport_, peer, address);
    return status.ok() ? "" : status.error().message.empty() ? "?" : status.error().message;
  }
  void disconnect(PeerId peer) override { transport_->disconnect(peer); }
  RemoteKey open(PeerId peer, KvOp op, const std::vector<Extent>& extents) override {
    std::vector<MemoryRange> ranges;
    for (const Extent& extent : extents) {
      REQUIRE(extent.begin + extent.bytes <= kSideBytes);
      const size_t end = extent.begin + extent.bytes, border = kRegionBytes[0];
      if (extent.begin < border) ranges.push_back({at(extent.begin), std::min(end, border) - extent.begin});
      if (const size_t begin = std::max(extent.begin, border); begin < end) ranges.push_back({at(begin), end - begin});
    }
    auto key = transport_->open(peer, op, ranges);
    if (!key.ok()) throw std::runtime_error(key.error().message);
    return key.value();
  }
  bool close(const RemoteKey& registration) override { return transport_->close(registration); }
  int arrived(const RemoteKey& registration) override { return transport_->arrived(registration); }

  TransferId post(const KvTransfer& transfer, const std::vector<Piece>& pieces) override {
    TransferPlan plan;
    const std::byte* bases[] = {transport_->remote(transfer.peer, 0), transport_->remote(transfer.peer, 1)};
    for (const Piece& piece : pieces) {
      const bool second = piece.remote >= kRegionBytes[0];
      auto* remote = const_cast<std::byte*>(bases[second]) + (piece.remote - (second ? kRegionBytes[0] : 0));
      std::byte* local = at(piece.local);
      plan.copies.push_back(transfer.op == KvOp::write ? Copy{local, remote, piece.bytes}
                                                       : Copy{remote, local, piece.bytes});
      plan.bytes += piece.bytes;
    }
    return transport_->post(transfer, plan);
  }
  TransferState poll(TransferId id) override { return transport_->poll(id); }
  void cancel(TransferId id) override { transport_->cancel(id); }

  void fill(size_t begin, size_t bytes, uint64_t seed, size_t from) override {
    each_run(begin, bytes, seed, from,
             [](std::byte* memory, std::span<const std::byte> run) { std::memcpy(memory, run.data(), run.size()); });
  }
  size_t differing(size_t begin, size_t bytes, uint64_t seed, size_t from) override {
    size_t n = 0;
    each_run(begin, bytes, seed, from, [&n](std::byte* memory, std::span<const std::byte> run) {
      if (std::memcmp(memory, run.data(), run.size()) == 0) return;
      for (size_t i = 0; i < run.size(); ++i) n += memory[i] != run[i];
    });
    return n;
  }

  void storm(const KvTransfer& transfer, const std::vector<Piece>& pieces) override {
    const TransferState state = settle(*this, post(transfer, pieces));
    ++(state == TransferState::done ? stormed_.done : stormed_.failed);
  }
  Stormed end_storm() override { return std::exchange(stormed_, {}); }

 private:
  // Visits memory beside its part of the pattern, region by region.
  template <class Each>
  void each_run(size_t begin, size_t bytes, uint64_t seed, size_t from, Each each) {
    // Another process may have told us that the other side has finished or may begin. A race detector does not see
    // that. The transport's locks show it.
    (void)transport_->arrived({});
    const size_t border = kRegionBytes[0];
    REQUIRE(begin + bytes <= kSideBytes);
    const size_t head = begin < border ? std::min(bytes, border - begin) : 0;
    auto part = [&](size_t offset, size_t n) {
      for_pattern(seed, from + offset, n,
                  [&](size_t done, std::span<const std::byte> run) { each(at(begin + offset) + done, run); });
    };
    part(0, head);
    part(head, bytes - head);
    (void)transport_->arrived({});
  }
  std::byte* at(size_t offset) {
    return offset < kRegionBytes[0] ? memory_[0].get() + offset : memory_[1].get() + (offset - kRegionBytes[0]);
  }
  RealClock clock_;
  std::vector<std::shared_ptr<std::byte>> memory_;
  TransportOptions options_;
  std::unique_ptr<KvTransport> transport_;
  Stormed stormed_;
};

// Lines over a socket, read byte by byte so that poll() sees what was not read.
struct Line {
  int fd;
  void say(std::string line) const {
    line.push_back('\n');
    for (size_t at = 0; at < line.size();) {
      const ssize_t n = send(fd, line.data() + at, line.size() - at, MSG_NOSIGNAL);
      if (n <= 0) throw std::runtime_error("the other process of the test is gone");
      at += size_t(n);
    }
  }
  bool hear(std::string& line) const {
    line.clear();
    for (char c; ::read(fd, &c, 1) == 1;) {
      if (c == '\n') return true;
      line.push_back(c);
    }
    return false;
  }
};

class SideThere final : public Side {
 public:
  SideThere(const TestedTransport& transport, PeerId self) {
    int fds[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fds[1], 3);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    const std::string command = "XPYD_TRANSPORT_PEER=" + std::to_string(self) + " " + transport.name;
    std::vector<char*> environment;
    for (char** e = environ; *e; ++e)
      if (!std::strstr(*e, "XPYD_REQUIRE_DEVICE")) environment.push_back(*e);
    environment.push_back(const_cast<char*>(command.c_str()));
    const std::string more = transport.environment + "=" + std::to_string(self);
    if (!transport.environment.empty()) environment.insert(environment.begin(), const_cast<char*>(more.c_str()));
    environment.push_back(nullptr);
    char program[] = "/proc/self/exe";
    std::string test = kPeerTest;
    char* arguments[] = {program, test.data(), nullptr};
    REQUIRE(posix_spawn(&pid_, program, &actions, nullptr, arguments, environment.data()) == 0);
    posix_spawn_file_actions_destroy(&actions);
    ::close(fds[1]);
    line_.fd = fds[0];
    std::string hello;
    if (!line_.hear(hello) || hello != "ready")
      throw std::runtime_error(transport.name + ": the other process: " + hello);
  }
  ~SideThere() override {
    kill(pid_, SIGCONT);  // before its end: later it would undo a leak checker's SIGSTOP
    ::close(line_.fd);
    int status;
    waitpid(pid_, &status, 0);
  }

  std::string address() override { return ask<std::string>("address"); }
  std::string connect(PeerId peer, const std::string& address) override {
    return ask<std::string>("connect", peer, address);
  }
  void disconnect(PeerId peer) override { ask<Nothing>("disconnect", peer); }
  RemoteKey open(PeerId peer, KvOp op, const std::vector<Extent>& extents) override {
    return ask<RemoteKey>("open", peer, op, extents);
  }
  bool close(const RemoteKey& registration) override { return ask<bool>("close", registration); }
  int arrived(const RemoteKey& registration) override { return ask<int>("arrived", registration); }
  TransferId post(const KvTransfer& transfer, const std::vector<Piece>& pieces) override {
    return ask<TransferId>("post", transfer, pieces);
  }
  TransferState poll(TransferId id) override { return ask<TransferState>("poll", id); }
  void cancel(TransferId id) override { ask<Nothing>("cancel", id); }
  void fill(size_t begin, size_t bytes, uint64_t seed, size_t from) override {
    ask<Nothing>("fill", begin, bytes, seed, from);
  }
  size_t differing(size_t begin, size_t bytes, uint64_t seed, size_t from) override {
    return ask<size_t>("differing", begin, bytes, seed, from);
  }
  void storm(const KvTransfer& transfer, const std::vector<Piece>& pieces) override { tell("storm", transfer, pieces); }
  Stormed end_storm() override { return ask<Stormed>("end_storm"); }
  pid_t pid() override { return pid_; }

 private:
  struct Nothing {};
  template <class... Words>
  void tell(const char* verb, const Words&... words) {
    std::ostringstream out;
    out.precision(17);
    out << verb << ' ';
    (Put{out}(words), ...);
    line_.say(out.str());
  }
  template <class Answer, class... Words>
  Answer ask(const char* verb, const Words&... words) {
    tell(verb, words...);
    std::string line;
    if (!line_.hear(line)) throw std::runtime_error("the other process of the test is gone");
    if (line.starts_with("error ")) throw std::runtime_error(line.substr(6));
    std::istringstream in(line);
    Answer answer{};
    Take{in}(answer);
    if (!in) throw std::runtime_error("the other process answered: " + line);
    return answer;
  }
  pid_t pid_ = 0;
  Line line_{};
};

// The other process. Each line names one of these calls with its arguments, and the answer is its result.
using Command = std::function<void(Side&, std::istream&, std::ostream&)>;
template <class R, class... A>
Command command(R (Side::*function)(A...)) {
  return [function](Side& side, std::istream& in, std::ostream& out) {
    std::tuple<std::decay_t<A>...> arguments;
    std::apply(
        [&](auto&... a) {
          (Take{in}(a), ...);
          if constexpr (std::is_void_v<R>)
            (side.*function)(a...);
          else
            Put{out}((side.*function)(a...));
        },
        arguments);
  };
}
const std::map<std::string, Command> kCommands = {{"address", command(&Side::address)},
                                                  {"connect", command(&Side::connect)},
                                                  {"disconnect", command(&Side::disconnect)},
                                                  {"open", command(&Side::open)},
                                                  {"close", command(&Side::close)},
                                                  {"arrived", command(&Side::arrived)},
                                                  {"post", command(&Side::post)},
                                                  {"poll", command(&Side::poll)},
                                                  {"cancel", command(&Side::cancel)},
                                                  {"fill", command(&Side::fill)},
                                                  {"differing", command(&Side::differing)},
                                                  {"end_storm", command(&Side::end_storm)}};

void obey(Side& side, const Line& line) {
  line.say("ready");
  for (std::string told; line.hear(told);) {
    std::istringstream in(told);
    std::string verb;
    in >> verb;
    if (verb == "storm") {
      KvTransfer transfer;
      std::vector<Piece> pieces;
      Take{in}(transfer), Take{in}(pieces);
      pollfd more{line.fd, POLLIN, 0};
      for (bool last = false; !last;) {
        last = ::poll(&more, 1, 0) != 0;
        side.storm(transfer, pieces);
      }
      continue;
    }
    std::ostringstream out;
    out.precision(17);
    try {
      kCommands.at(verb)(side, in, out);
    } catch (const std::exception& error) {
      out.str(std::string("error ") + error.what());
    }
    line.say(out.str());
  }
}

TEST_CASE("the other process of a transport test", "[.transport-peer]") {
  const char* role = std::getenv("XPYD_TRANSPORT_PEER");
  if (!role) return;
  std::istringstream in(role);
  std::string name;
  PeerId self = 0;
  std::getline(in >> self >> std::ws, name);  // names have blanks
  for (const TestedTransport& transport : tested_transports()) {
    if (transport.name != name) continue;
    obey(*make_side_here(transport, self), {3});
  }
}

}  // namespace

RegisterTransport::RegisterTransport(TestedTransport transport) { registered().push_back(std::move(transport)); }
const std::vector<TestedTransport>& tested_transports() { return registered(); }

std::unique_ptr<Side> make_side_here(const TestedTransport& transport, PeerId self) {
  return std::make_unique<SideHere>(transport, self);
}
std::unique_ptr<Side> make_side_there(const TestedTransport& transport, PeerId self) {
  return std::make_unique<SideThere>(transport, self);
}

void wait_until(const std::function<bool()>& holds) {
  RealClock clock;
  for (const double start = clock.now(); !holds(); sched_yield())
    if (clock.now() > start + 60) throw std::runtime_error("it is not so after a minute");
}
TransferState settle(Side& side, TransferId id) {
  TransferState state{};
  wait_until([&] { return (state = side.poll(id)) != TransferState::in_flight; });
  return state;
}
void close_for_good(Side& side, const RemoteKey& registration) {
  wait_until([&] { return side.close(registration); });
}

}  // namespace xpyd::testing

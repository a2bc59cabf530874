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
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "base/row_hash.h"
#include "experiments/connect_and_wait.h"
#include "tests/catch.h"

extern char** environ;

namespace xpyd::testing {
namespace {

constexpr const char* kPeerTest = "the other process of a transport test";

std::vector<Wire>& registered() {
  static std::vector<Wire> all;
  return all;
}

// Bytes [from, from + bytes) of a pattern, in runs of a few KiB: run(offset, its bytes).
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
  SideHere(const Wire& wire, PeerId self) {
    for (size_t bytes : kRegionBytes) {
      memory_.push_back(wire.memory(bytes));
      options_.regions.push_back({memory_.back().get(), bytes});
    }
    options_.queue = &cpu_queue();
    options_.clock = &clock_;
    options_.self = self;
    auto made = wire.make(options_);
    if (!made.ok()) throw std::runtime_error(wire.name + ": " + made.error().message);
    transport_ = std::move(made).value();
  }

  std::string address() override { return transport_->address(); }
  std::string connect(PeerId peer, const std::string& address) override {
    Status status = connect_and_wait(*transport_, peer, address);
    return status.ok() ? "" : status.error().message.empty() ? "?" : status.error().message;
  }
  void disconnect(PeerId peer) override { transport_->disconnect(peer); }
  WindowKey open(PeerId peer, KvOp op, const std::vector<Extent>& extents) override {
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
  bool close(const WindowKey& window) override { return transport_->close(window); }
  int arrived(const WindowKey& window) override { return transport_->arrived(window); }

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
  TransportStats stats() override { return transport_->stats(); }
  double now() override { return clock_.now(); }

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
  // The pattern beside the memory it belongs to, region by region.
  template <class Each>
  void each_run(size_t begin, size_t bytes, uint64_t seed, size_t from, Each each) {
    // That the other side has finished, or may begin, another process may have told us, which a
    // race detector does not see. The transport's locks show it.
    transport_->stats();
    const size_t border = kRegionBytes[0];
    REQUIRE(begin + bytes <= kSideBytes);
    const size_t head = begin < border ? std::min(bytes, border - begin) : 0;
    auto part = [&](size_t offset, size_t n) {
      for_pattern(seed, from + offset, n,
                  [&](size_t done, std::span<const std::byte> run) { each(at(begin + offset) + done, run); });
    };
    part(0, head);
    part(head, bytes - head);
    transport_->stats();
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

// Words of a command or an answer, as text.
std::ostream& operator<<(std::ostream& out, const WindowKey& key) {
  return out << key.index << ' ' << key.generation << ' ' << key.secret;
}
std::istream& operator>>(std::istream& in, WindowKey& key) { return in >> key.index >> key.generation >> key.secret; }
void write_post(std::ostream& out, const KvTransfer& t, const std::vector<Piece>& pieces) {
  out.precision(17);
  out << t.peer << ' ' << int(t.op) << ' ' << t.window << ' ' << t.deadline_s << ' ' << pieces.size();
  for (const Piece& p : pieces) out << ' ' << p.local << ' ' << p.remote << ' ' << p.bytes;
}
void read_post(std::istream& in, KvTransfer& t, std::vector<Piece>& pieces) {
  int op = 0;
  size_t n = 0;
  in >> t.peer >> op >> t.window >> t.deadline_s >> n;
  t.op = KvOp(op);
  pieces.resize(n);
  for (Piece& p : pieces) in >> p.local >> p.remote >> p.bytes;
}

bool read_line(FILE* file, std::string& line) {
  line.clear();
  for (int c; (c = std::getc(file)) != EOF;) {
    if (c == '\n') return true;
    line.push_back(char(c));
  }
  return false;
}

class SideThere final : public Side {
 public:
  SideThere(const Wire& wire, PeerId self) {
    int fds[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fds[1], 3);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    const std::string command = "XPYD_TRANSPORT_PEER=" + std::to_string(self) + " " + wire.name;
    std::vector<char*> environment;
    for (char** e = environ; *e; ++e)
      if (!std::strstr(*e, "XPYD_REQUIRE_DEVICE")) environment.push_back(*e);
    environment.push_back(const_cast<char*>(command.c_str()));
    const std::string more = wire.environment + "=" + std::to_string(self);
    if (!wire.environment.empty()) environment.insert(environment.begin(), const_cast<char*>(more.c_str()));
    environment.push_back(nullptr);
    char program[] = "/proc/self/exe";
    std::string test = kPeerTest;
    char* arguments[] = {program, test.data(), nullptr};
    REQUIRE(posix_spawn(&pid_, program, &actions, nullptr, arguments, environment.data()) == 0);
    posix_spawn_file_actions_destroy(&actions);
    ::close(fds[1]);
    socket_ = fdopen(fds[0], "r");  // written with send()
    REQUIRE(socket_);
    std::string hello;
    if (!read_line(socket_, hello) || hello != "ready")
      throw std::runtime_error(wire.name + ": the other process: " + hello);
  }
  ~SideThere() override {
    kill(pid_, SIGCONT);  // first: behind its end, a leak checker's SIGSTOP would be undone
    fclose(socket_);
    int status;
    waitpid(pid_, &status, 0);
  }

  std::string address() override { return ask("address"); }
  std::string connect(PeerId peer, const std::string& address) override { return ask("connect", peer, address); }
  void disconnect(PeerId peer) override { ask("disconnect", peer); }
  WindowKey open(PeerId peer, KvOp op, const std::vector<Extent>& extents) override {
    std::ostringstream list;
    for (const Extent& e : extents) list << ' ' << e.begin << ' ' << e.bytes;
    return answer<WindowKey>(ask("open", peer, int(op), extents.size(), list.str()));
  }
  bool close(const WindowKey& window) override { return answer<bool>(ask("close", window)); }
  int arrived(const WindowKey& window) override { return answer<int>(ask("arrived", window)); }
  TransferId post(const KvTransfer& transfer, const std::vector<Piece>& pieces) override {
    std::ostringstream out;
    write_post(out, transfer, pieces);
    return answer<TransferId>(ask("post", out.str()));
  }
  TransferState poll(TransferId id) override { return TransferState(answer<int>(ask("poll", id))); }
  void cancel(TransferId id) override { ask("cancel", id); }
  TransportStats stats() override {
    std::istringstream in(ask("stats"));
    TransportStats s;
    in >> s.posts >> s.failed >> s.bytes >> s.descriptors >> s.refused;
    return s;
  }
  double now() override { return answer<double>(ask("now")); }
  void fill(size_t begin, size_t bytes, uint64_t seed, size_t from) override { ask("fill", begin, bytes, seed, from); }
  size_t differing(size_t begin, size_t bytes, uint64_t seed, size_t from) override {
    return answer<size_t>(ask("differing", begin, bytes, seed, from));
  }
  void storm(const KvTransfer& transfer, const std::vector<Piece>& pieces) override {
    std::ostringstream out;
    write_post(out, transfer, pieces);
    tell("storm " + out.str());
  }
  Stormed end_storm() override {
    std::istringstream in(ask("end"));
    Stormed stormed;
    in >> stormed.done >> stormed.failed;
    return stormed;
  }
  pid_t pid() override { return pid_; }

 private:
  void tell(const std::string& line) {
    const std::string text = line + "\n";
    for (size_t at = 0; at < text.size();) {
      const ssize_t n = send(fileno(socket_), text.data() + at, text.size() - at, MSG_NOSIGNAL);
      if (n <= 0) throw std::runtime_error("the other process of the test is gone");
      at += size_t(n);
    }
  }
  template <class... Words>
  std::string ask(const Words&... words) {
    std::ostringstream out;
    ((out << words << ' '), ...);
    tell(out.str());
    std::string line;
    if (!read_line(socket_, line)) throw std::runtime_error("the other process of the test is gone");
    if (line.starts_with("error ")) throw std::runtime_error(line.substr(6));
    return line;
  }
  template <class T>
  static T answer(const std::string& line) {
    std::istringstream in(line);
    T value{};
    in >> value;
    if (!in) throw std::runtime_error("the other process answered: " + line);
    return value;
  }
  pid_t pid_ = 0;
  FILE* socket_ = nullptr;
};

// The other process: lines in, one line out for each.
class Peer {
 public:
  Peer(Side& side) : side_(side) {}

  void run() {
    say("ready");
    std::string line;
    while (next_line(line)) {
      std::istringstream in(line);
      std::string verb;
      in >> verb;
      std::ostringstream out;
      out.precision(17);
      try {
        if (verb == "storm") {
          storm(in);
          continue;
        }
        obey(verb, in, out);
      } catch (const std::exception& error) {
        say(std::string("error ") + error.what());
        continue;
      }
      say(out.str());
    }
  }

 private:
  void obey(const std::string& verb, std::istream& in, std::ostream& out) {
    if (verb == "address") {
      out << side_.address();
    } else if (verb == "connect") {
      PeerId peer;
      std::string address;
      in >> peer >> address;
      out << side_.connect(peer, address);
    } else if (verb == "disconnect") {
      PeerId peer;
      in >> peer;
      side_.disconnect(peer);
    } else if (verb == "open") {
      PeerId peer;
      int op;
      size_t n;
      in >> peer >> op >> n;
      std::vector<Extent> extents(n);
      for (Extent& e : extents) in >> e.begin >> e.bytes;
      out << side_.open(peer, KvOp(op), extents);
    } else if (verb == "close" || verb == "arrived") {
      WindowKey key;
      in >> key;
      out << (verb == "close" ? int(side_.close(key)) : side_.arrived(key));
    } else if (verb == "post") {
      KvTransfer transfer;
      std::vector<Piece> pieces;
      read_post(in, transfer, pieces);
      out << side_.post(transfer, pieces);
    } else if (verb == "poll" || verb == "cancel") {
      TransferId id;
      in >> id;
      if (verb == "poll")
        out << int(side_.poll(id));
      else
        side_.cancel(id);
    } else if (verb == "stats") {
      const TransportStats s = side_.stats();
      out << s.posts << ' ' << s.failed << ' ' << s.bytes << ' ' << s.descriptors << ' ' << s.refused;
    } else if (verb == "now") {
      out << side_.now();
    } else if (verb == "fill" || verb == "differing") {
      size_t at, bytes, from;
      uint64_t seed;
      in >> at >> bytes >> seed >> from;
      if (verb == "fill")
        side_.fill(at, bytes, seed, from);
      else
        out << side_.differing(at, bytes, seed, from);
    } else if (verb == "end") {
      out << stormed_.done << ' ' << stormed_.failed;
      stormed_ = {};
    } else {
      throw std::runtime_error("no such command: " + verb);
    }
  }

  void storm(std::istream& in) {
    KvTransfer transfer;
    std::vector<Piece> pieces;
    read_post(in, transfer, pieces);
    stormed_ = {};
    for (pollfd told{3, POLLIN, 0}; ::poll(&told, 1, 0) == 0;) {
      const TransferState state = settle(side_, side_.post(transfer, pieces));
      ++(state == TransferState::done ? stormed_.done : stormed_.failed);
    }
  }

  // Reads byte by byte: poll() in storm() must see what was not read.
  bool next_line(std::string& line) {
    line.clear();
    for (char c; ::read(3, &c, 1) == 1;) {
      if (c == '\n') return true;
      line.push_back(c);
    }
    return false;
  }
  void say(std::string line) {
    line.push_back('\n');
    for (size_t at = 0; at < line.size();) {
      const ssize_t n = send(3, line.data() + at, line.size() - at, MSG_NOSIGNAL);
      if (n <= 0) _exit(0);
      at += size_t(n);
    }
  }
  Side& side_;
  Side::Stormed stormed_;
};

TEST_CASE("the other process of a transport test", "[.transport-peer]") {
  const char* role = std::getenv("XPYD_TRANSPORT_PEER");
  if (!role) return;
  std::istringstream in(role);
  std::string name;
  PeerId self = 0;
  std::getline(in >> self >> std::ws, name);  // names have blanks
  for (const Wire& wire : wires()) {
    if (wire.name != name) continue;
    std::unique_ptr<Side> side = make_side_here(wire, self);
    Peer(*side).run();
  }
}

}  // namespace

RegisterWire::RegisterWire(Wire wire) { registered().push_back(std::move(wire)); }
const std::vector<Wire>& wires() { return registered(); }

std::unique_ptr<Side> make_side_here(const Wire& wire, PeerId self) { return std::make_unique<SideHere>(wire, self); }
std::unique_ptr<Side> make_side_there(const Wire& wire, PeerId self) { return std::make_unique<SideThere>(wire, self); }

TransferState settle(Side& side, TransferId id) {
  RealClock clock;
  for (const double start = clock.now(); clock.now() < start + 60;) {
    const TransferState state = side.poll(id);
    if (state != TransferState::in_flight) return state;
    sched_yield();
  }
  throw std::runtime_error("a transfer is not settled after a minute");
}

void close_for_good(Side& side, const WindowKey& window) {
  RealClock clock;
  for (const double start = clock.now(); !side.close(window); sched_yield())
    if (clock.now() > start + 60) throw std::runtime_error("a window does not close");
}

}  // namespace xpyd::testing

// Nobody's loop waits for a peer: connect() of every wire with a handshake goes on beside other work, towards peers
// that let us in and say nothing, or do not even let us in, and fails by its deadline.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <optional>

#include "experiments/connect_and_wait.h"
#include "tests/catch.h"
#include "tests/disagg/sim_cluster.h"
#include "tests/disagg/transport_side.h"
#include "tests/wrapped_transport.h"

namespace xpyd::testing::connect_test {
namespace {

// Listens where an address of a wire leads to, and takes what comes without a word.
class SilentPeer {
 public:
  // `like`: a true address of that wire. `full`: there is no room at its door, either.
  explicit SilentPeer(const std::string& like, bool full = false) {
    if (like.starts_with("shm:@")) {
      auto& at = reinterpret_cast<sockaddr_un&>(at_);
      at.sun_family = AF_UNIX;
      address = like;
      address.append("-silent");
      const std::string name = address.substr(5);
      std::memcpy(at.sun_path + 1, name.data(), name.size());
      length_ = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
      listen(AF_UNIX, SOCK_STREAM, full);
    } else {
      auto& at = reinterpret_cast<sockaddr_in&>(at_);
      at.sin_family = AF_INET;
      at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      length_ = sizeof at;
      listen(AF_INET, SOCK_STREAM, full);
      const char separator = ',';  // KIND,HOST,PORT,…
      const size_t host = like.find(separator) + 1, port = like.find(separator, host) + 1;
      address = like;
      address.replace(port, like.find(separator, port) - port, std::to_string(ntohs(at.sin_port)));
    }
  }
  ~SilentPeer() {
    for (int fd : fds_) close(fd);
  }
  std::string address;

 private:
  void listen(int family, int type, bool full) {
    fds_.push_back(socket(family, type | SOCK_CLOEXEC, 0));
    auto* at = reinterpret_cast<sockaddr*>(&at_);
    REQUIRE(bind(fds_[0], at, length_) == 0);
    REQUIRE(::listen(fds_[0], full ? 0 : 64) == 0);
    REQUIRE(getsockname(fds_[0], at, &length_) == 0);
    for (int i = 0; full && i < 4; ++i) {  // callers that nobody lets in
      fds_.push_back(socket(family, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      (void)!connect(fds_.back(), at, length_);
    }
  }
  sockaddr_storage at_{};
  socklen_t length_ = 0;
  std::vector<int> fds_;
};

bool has_handshake(const Wire& wire) { return wire.name != "local"; }

TEST_CASE("connect: a peer that listens and is silent is waited for by nobody", "[transport]") {
  for (const Wire& wire : wires()) {
    if (!has_handshake(wire)) continue;
    if (wire.missing && !wire.missing().empty()) {
      mark_skipped(wire.missing());
      continue;
    }
    for (bool full : {false, true}) {
      INFO(wire.name << (full ? ", no room at the door" : ""));
      VirtualClock clock;
      clock.seconds = 100;
      const auto memory = wire.memory(1 << 16), theirs = wire.memory(1 << 16);
      TransportOptions options{
          .regions = {{memory.get(), 1 << 16}}, .queue = &cpu_queue(), .clock = &clock, .self = 1, .connect_s = 3};
      auto here = wire.make(options).value();
      const SilentPeer silent(here->address(), full);
      for (int round = 0; round < 2; ++round) {  // and it may be tried again
        for (int i = 0; i < 100; ++i) {          // a wire that waits has no clock that moves
          const auto connected = here->connect(2, silent.address);
          REQUIRE(connected);
          REQUIRE(!connected.value());
          clock.seconds += 0.029;
        }
        clock.seconds += 0.2;
        const auto connected = here->connect(2, silent.address);
        REQUIRE(!connected);
        CHECK(connected.error().code == ErrorCode::unavailable);
        CHECK(connected.error().message.find("does not answer") != std::string::npos);
        CHECK(!here->open(2, KvOp::write, {}));
      }
      // Given up in the middle; another peer is reached meanwhile, and at last under this number.
      REQUIRE(here->connect(2, silent.address));
      if (!wire.shares_process) continue;
      options.regions = {{theirs.get(), 1 << 16}};
      options.self = 3;
      auto third = wire.make(options).value();
      REQUIRE(connect_and_wait(*here, 3, third->address()).ok());
      CHECK(!here->connect(2, silent.address).value());
      here->disconnect(2);
      REQUIRE(connect_and_wait(*here, 2, third->address()).ok());
      CHECK(here->connect(2, third->address()).value());
      CHECK(here->open(2, KvOp::write, {}));
      CHECK(!here->connect(2, silent.address));
    }
  }
}

// Real wires under instances: one of two decode instances has an address where nobody answers.
TEST_CASE("connect: an instance goes on while a peer is silent", "[transport][cluster]") {
  for (const char* name : {"tcp", "shm"}) {
    INFO(name);
    const TransportRow& row = *find_transport(name);
    SimOptions options;
    if (row.pool_device) options.kv.device = &row.pool_device();
    std::optional<SilentPeer> silent;
    // Whom P must not reach. Of the third instance it is told the silent door's address.
    class Wire final : public ForwardingTransport {
     public:
      Wire(std::unique_ptr<KvTransport> inner, std::optional<SilentPeer>& silent, PeerId self)
          : ForwardingTransport(std::move(inner)), silent_(silent), self_(self) {
        if (!silent_) silent_.emplace(ForwardingTransport::address());
      }
      std::string address() const override { return self_ == 2 ? silent_->address : ForwardingTransport::address(); }

     private:
      std::optional<SilentPeer>& silent_;
      const PeerId self_;
    };
    options.wire = [&](const TransportOptions& wire) {
      return std::make_unique<Wire>(row.make(wire).value(), silent, wire.self);
    };
    SimCluster sim;
    sim.open(options);
    sim.add_all("1P2D");
    auto recorder = std::make_shared<Recorder>();
    std::map<uint64_t, std::vector<int32_t>> expected;
    const auto ask = [&](uint64_t id) {
      std::vector<int32_t> prompt;
      for (int i = 0; i < 40; ++i) prompt.push_back((i * 7 + int(id) * 19) % 251);
      auto request = tiny_request(id, prompt, 6);
      request->ignore_eos = true;
      request->arrival_s = sim.clock.seconds;
      expected[id] = checksum_tokens(prompt, 6);
      REQUIRE(sim.conductor().submit(request, recorder).ok());
    };
    for (uint64_t id = 1; id < 9; ++id) ask(id);
    // Leases are 0.4 s: whoever stood still for so long would have been given up.
    const auto ended = [&] {
      int n = 0;
      for (const auto& [id, tokens] : expected) n += recorder->choice(id).ends;
      return n;
    };
    // Half of them are placed on the one that can be reached.
    RealClock real;
    for (const double start = real.now(); ended() < 4 && real.now() < start + 30;) {
      if (sim.clock.seconds < 4) sim.tick();
      // The wires' threads live in real time: an instant of the sockets is not a lease of the clock.
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    CHECK(ended() >= 4);
    CHECK(ended() < 8);
    CHECK(sim.conductor().members().size() == 3);
    // Whose client leaves does not wait for the wire.
    uint64_t left = 1;
    while (recorder->choice(left).ends > 0) ++left;
    sim.conductor().abort(left);
    sim.ticks(40);
    CHECK(recorder->choice(left).ends == 1);
    CHECK(recorder->choice(left).finish == FinishReason::abort);
    expected.erase(left);
    // The others wait for the wire, and are placed anew when it has failed.
    while (sim.clock.seconds < 4.9) sim.tick();
    CHECK(ended() < 7);
    for (int i = 0; i < 60000 && ended() < 7; ++i) sim.tick();
    CHECK(ended() == 7);
    for (const auto& [id, tokens] : expected) CHECK(recorder->choice(id).tokens == tokens);
    CHECK(sim.conductor().members().size() == 3);
  }
}

}  // namespace
}  // namespace xpyd::testing::connect_test

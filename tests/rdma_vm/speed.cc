// rdma_speed write_bw|read_bw|write_lat|read_lat DEVICE: the rdma transport between two processes, as instances use it,
// in the units of perftest's programs of these names, beside which tests.sh runs it. It checks every byte before it
// prints a number.

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/device/device.h"
#include "disagg/transport/transports.h"
#include "experiments/connect_and_wait.h"

namespace xpyd::testing {
namespace {

constexpr size_t kBlock = 64 << 10;
constexpr size_t kBlocks = 128;  // at every second place, so that no two are neighbours
constexpr size_t kMemory = 2 * kBlock * kBlocks;
constexpr int kPasses = 12;  // over all blocks: 96 MiB
constexpr size_t kBlocksOfPost = 16;
constexpr int kRounds = 1000, kWarm = 200;

struct Note {
  char address[512];
  RemoteKey write, read;
};

class Side {
 public:
  Side(PeerId self, const std::string& device, int socket) : socket_(socket) {
    memory = cpu_device().allocate(kMemory).value();
    TransportOptions options;
    const MemoryRange all(memory.get(), kMemory);
    options.regions = {all};
    options.queue = &cpu_queue();
    options.clock = &clock;
    options.self = self;
    options.nics = {device};
    auto made = make_rdma_transport(options);
    if (!made) stop(made.error().message);
    transport = std::move(made.value());
    peer = 1 - self;
    Note mine{};
    std::snprintf(mine.address, sizeof mine.address, "%s", transport->address().c_str());
    theirs = exchange(mine);
    if (auto connected = connect_and_wait(*transport, peer, theirs.address); !connected)
      stop(connected.error().message);
    mine.write = transport->open(peer, KvOp::write, {&all, 1}).value();
    mine.read = transport->open(peer, KvOp::read, {&all, 1}).value();
    ours = mine;
    theirs = exchange(mine);
  }
  Note exchange(const Note& mine) {
    Note got{};
    if (write(socket_, &mine, sizeof mine) != ssize_t(sizeof mine) ||
        recv(socket_, &got, sizeof got, MSG_WAITALL) != ssize_t(sizeof got))
      stop("the other process ended");
    return got;
  }
  // Starts a transfer of `n` blocks from `first` on, `bytes` of each.
  TransferId post(KvOp op, size_t first, size_t n, size_t bytes) {
    plan.copies.clear();
    for (size_t block = first; block < first + n; ++block) {
      std::byte* local = memory.get() + block * 2 * kBlock;
      std::byte* remote = transport->remote(peer, 0) + block * 2 * kBlock;
      plan.copies.push_back(op == KvOp::write ? Copy{local, remote, bytes} : Copy{remote, local, bytes});
    }
    plan.bytes = bytes * n;
    return transport->post({peer, op, op == KvOp::write ? theirs.write : theirs.read, 0}, plan);
  }
  void wait(TransferId id) {
    TransferState state;
    while ((state = transport->poll(id)) == TransferState::in_flight) {
    }
    if (state != TransferState::done) stop("a transfer failed");
  }
  void wait_arrived(int n) {
    while (transport->arrived(ours.write) < n) {
    }
  }
  void fill(size_t round) {
    for (size_t i = 0; i < kMemory; i += 8) {
      const uint64_t word = (i + round) * 0x9e3779b97f4a7c15u;
      std::memcpy(memory.get() + i, &word, 8);
    }
  }
  bool holds(size_t round, size_t bytes) {
    for (size_t block = 0; block < kBlocks; ++block)
      for (size_t i = 0; i < bytes; i += 8) {
        const size_t at = block * 2 * kBlock + i;
        const uint64_t word = (at + round) * 0x9e3779b97f4a7c15u;
        if (std::memcmp(memory.get() + at, &word, 8) != 0) return false;
      }
    return true;
  }
  [[noreturn]] static void stop(const std::string& why) {
    std::fprintf(stderr, "rdma_speed: %s\n", why.c_str());
    std::exit(1);
  }

  RealClock clock;
  std::shared_ptr<std::byte> memory;
  std::unique_ptr<KvTransport> transport;
  PeerId peer = -1;
  Note ours, theirs;
  TransferPlan plan;

 private:
  const int socket_;
};

// Prints the median and the least.
void print(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  std::printf("%.2f %.2f\n", times[times.size() / 2], times[0]);
}

// MiB/s of blocks of 64 KiB, with kPosts transfers ahead. Transfers from before the clock starts are over by then.
double stream(Side& side, KvOp op) {
  constexpr size_t kPosts = kBlocks / kBlocksOfPost;
  std::vector<TransferId> ids;
  auto pass = [&] {
    for (size_t b = 0; b < kBlocks; b += kBlocksOfPost) {
      ids.push_back(side.post(op, b, kBlocksOfPost, kBlock));
      if (ids.size() > kPosts) side.wait(ids[ids.size() - 1 - kPosts]);
    }
  };
  auto drain = [&] {
    for (size_t i = ids.size() - kPosts; i < ids.size(); ++i) side.wait(ids[i]);
    ids.clear();
  };
  pass(), drain();
  const double start = side.clock.now();
  for (int i = 0; i < kPasses; ++i) pass();
  drain();
  return double(kPasses) * kBlocks * kBlock / (1 << 20) / (side.clock.now() - start);
}

void write_bw(Side& side, bool poster) {
  if (poster) {
    side.fill(1);
    const double speed = stream(side, KvOp::write);
    side.exchange(side.ours);
    std::printf("%.2f\n", speed);
  } else {
    side.exchange(side.ours);
    if (side.transport->arrived(side.ours.write) != int(kBlocks / kBlocksOfPost) * (1 + kPasses) ||
        !side.holds(1, kBlock))
      side.stop("wrong bytes");
  }
}

void read_bw(Side& side, bool poster) {
  side.fill(poster ? 1 : 2);
  side.exchange(side.ours);
  if (poster) {
    const double speed = stream(side, KvOp::read);
    if (!side.holds(2, kBlock)) side.stop("wrong bytes");
    std::printf("%.2f\n", speed);
  }
  side.exchange(side.ours);
}

// Half of a round of two small writes, each seen by arrived(), in us. The clock is read once a round, as in perftest.
void write_lat(Side& side, bool poster) {
  std::vector<double> halves;
  side.fill(poster ? 1 : 2);
  TransferId last = 0;
  double start = side.clock.now();
  for (int round = 0; round < kWarm + kRounds; ++round) {
    if (!poster) side.wait_arrived(round + 1);
    const TransferId id = side.post(KvOp::write, size_t(round) % kBlocks, 1, 8);
    if (last) side.wait(last);
    last = id;
    if (!poster) continue;
    side.wait_arrived(round + 1);
    const double now = side.clock.now();
    if (round >= kWarm) halves.push_back((now - start) / 2 * 1e6);
    start = now;
  }
  side.wait(last);
  if (!poster && !side.holds(1, 8)) side.stop("wrong bytes");
  side.exchange(side.ours);
  if (poster) print(halves);
}

// A read of 8 bytes until it is done, in us.
void read_lat(Side& side, bool poster) {
  side.fill(poster ? 1 : 2);
  side.exchange(side.ours);
  if (poster) {
    std::vector<double> times;
    double start = side.clock.now();
    for (int round = 0; round < kWarm + kRounds; ++round) {
      side.wait(side.post(KvOp::read, size_t(round) % kBlocks, 1, 8));
      const double now = side.clock.now();
      if (round >= kWarm) times.push_back((now - start) * 1e6);
      start = now;
    }
    if (!side.holds(2, 8)) side.stop("wrong bytes");
    print(times);
  }
  side.exchange(side.ours);
}

int run(const std::string& what, const std::string& device) {
  void (*measure)(Side&, bool) = what == "write_bw"    ? write_bw
                                 : what == "read_bw"   ? read_bw
                                 : what == "write_lat" ? write_lat
                                 : what == "read_lat"  ? read_lat
                                                       : nullptr;
  int ends[2];
  if (!measure || socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) return 2;
  const pid_t child = fork();  // before any device is open
  close(ends[child == 0 ? 0 : 1]);
  {
    Side side(child == 0 ? 1 : 0, device, ends[child == 0 ? 1 : 0]);
    measure(side, child != 0);
    std::fflush(stdout);
  }
  if (child == 0) _exit(0);
  int status = 1;
  waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
}

}  // namespace
}  // namespace xpyd::testing

int main(int argc, char** argv) {
  if (argc == 3) return xpyd::testing::run(argv[1], argv[2]);
  std::fprintf(stderr, "rdma_speed write_bw|read_bw|write_lat|read_lat DEVICE\n");
  return 2;
}

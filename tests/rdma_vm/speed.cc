// rdma_speed write_bw|write_lat|read_lat DEVICE: the rdma wire between two processes, as its
// instances use it, in the units of perftest's programs of these names, beside which tests.sh runs
// it. Checks every byte before it says a number.

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/device.h"
#include "disagg/transport/wires.h"

namespace xpyd {
namespace {

constexpr size_t kBlock = 64 << 10;
constexpr size_t kBlocks = 128;  // at every second place, so that no two are neighbours
constexpr size_t kMemory = 2 * kBlock * kBlocks;
constexpr int kPasses = 12;  // over all blocks: 96 MiB
constexpr int kBlocksOfPost = 16;
constexpr int kRounds = 2000, kWarm = 200;

struct Note {
  char address[512];
  WindowKey write, read;
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
    wire = std::move(made.value());
    peer = 1 - self;
    Note mine{};
    std::snprintf(mine.address, sizeof mine.address, "%s", wire->address().c_str());
    theirs = exchange(mine);
    if (auto connected = wire->connect(peer, theirs.address); !connected)
      stop(connected.error().message);
    mine.write = wire->open(peer, KvOp::write, {&all, 1}).value();
    mine.read = wire->open(peer, KvOp::read, {&all, 1}).value();
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
  TransferId post(KvOp op, const std::vector<size_t>& blocks, size_t bytes) {
    plan.copies.clear();
    for (size_t block : blocks) {
      std::byte* local = memory.get() + block * 2 * kBlock;
      std::byte* remote = wire->remote(peer, 0) + block * 2 * kBlock;
      plan.copies.push_back(op == KvOp::write ? Copy{local, remote, bytes}
                                              : Copy{remote, local, bytes});
    }
    plan.bytes = bytes * blocks.size();
    return wire->post({peer, op, op == KvOp::write ? theirs.write : theirs.read, 0}, plan);
  }
  void wait(TransferId id) {
    TransferState state;
    while ((state = wire->poll(id)) == TransferState::in_flight) {
    }
    if (state != TransferState::done) stop("a transfer failed");
  }
  void wait_arrived(int n) {
    while (wire->arrived(ours.write) < n) {
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
  std::unique_ptr<KvTransport> wire;
  PeerId peer = -1;
  Note ours, theirs;
  TransferPlan plan;

 private:
  const int socket_;
};

std::vector<size_t> run_of_blocks(size_t from, size_t n) {
  std::vector<size_t> blocks;
  for (size_t i = 0; i < n; ++i) blocks.push_back(from + i);
  return blocks;
}

void write_all(Side& side) {
  std::vector<TransferId> ids;
  for (size_t b = 0; b < kBlocks; b += kBlocksOfPost)
    ids.push_back(side.post(KvOp::write, run_of_blocks(b, kBlocksOfPost), kBlock));
  for (TransferId id : ids) side.wait(id);
}

// MiB/s of blocks of 64 KiB.
void write_bw(Side& side, bool poster) {
  constexpr int kPosts = kBlocks / kBlocksOfPost;
  if (poster) {
    side.fill(1);
    write_all(side);
    const double start = side.clock.now();
    std::vector<TransferId> ids;
    for (int pass = 0; pass < kPasses; ++pass) {
      for (size_t b = 0; b < kBlocks; b += kBlocksOfPost) {
        ids.push_back(side.post(KvOp::write, run_of_blocks(b, kBlocksOfPost), kBlock));
        if (ids.size() > kPosts) side.wait(ids[ids.size() - 1 - kPosts]);
      }
    }
    for (size_t i = ids.size() - kPosts; i < ids.size(); ++i) side.wait(ids[i]);
    const double seconds = side.clock.now() - start;
    side.exchange(side.ours);
    std::printf("%.2f\n", double(kPasses) * kBlocks * kBlock / (1 << 20) / seconds);
  } else {
    side.exchange(side.ours);
    if (side.wire->arrived(side.ours.write) != kPosts * (1 + kPasses) || !side.holds(1, kBlock))
      side.stop("wrong bytes");
  }
}

// Half of a round of two small writes, each seen by arrived(), in us: the median.
void write_lat(Side& side, bool poster) {
  std::vector<double> halves;
  side.fill(poster ? 1 : 2);
  TransferId last = 0;
  for (int round = 0; round < kWarm + kRounds; ++round) {
    const double start = side.clock.now();
    if (!poster) side.wait_arrived(round + 1);
    const TransferId id = side.post(KvOp::write, {size_t(round) % kBlocks}, 8);
    if (last) side.wait(last);
    last = id;
    if (poster) side.wait_arrived(round + 1);
    if (round >= kWarm) halves.push_back((side.clock.now() - start) / 2 * 1e6);
  }
  side.wait(last);
  if (!poster && !side.holds(1, 8)) side.stop("wrong bytes");
  side.exchange(side.ours);
  std::nth_element(halves.begin(), halves.begin() + kRounds / 2, halves.end());
  if (poster) std::printf("%.2f\n", halves[kRounds / 2]);
}

// A read of 8 bytes until it is done, in us: the median.
void read_lat(Side& side, bool poster) {
  side.fill(poster ? 1 : 2);
  side.exchange(side.ours);
  if (poster) {
    std::vector<double> times;
    for (int round = 0; round < kWarm + kRounds; ++round) {
      const double start = side.clock.now();
      side.wait(side.post(KvOp::read, {size_t(round) % kBlocks}, 8));
      if (round >= kWarm) times.push_back((side.clock.now() - start) * 1e6);
    }
    if (!side.holds(2, 8)) side.stop("wrong bytes");
    std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
    std::printf("%.2f\n", times[kRounds / 2]);
  }
  side.exchange(side.ours);
}

int run(const std::string& what, const std::string& device) {
  void (*measure)(Side&, bool) = what == "write_bw"    ? write_bw
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
}  // namespace xpyd

int main(int argc, char** argv) {
  if (argc == 3) return xpyd::run(argv[1], argv[2]);
  std::fprintf(stderr, "rdma_speed write_bw|write_lat|read_lat DEVICE\n");
  return 2;
}

// Transports beside the machine's own limits.
//
// Expected: KV of one token of a 1B Llama (16 layers, 8 heads of 64, bf16) is 32 KiB, so 4,096 tokens are 134 MB. One
// core copies that in 8 ms with non-temporal stores (17 GB/s), and in 14 ms with memcpy. Loopback TCP copies twice
// through the kernel and takes 40 ms at 3.3 GB/s. A hand-off moves 256 block ids. A plan of 64 KiB pieces has 2,048
// pieces of 0.2 us each: 0.4 ms, 5 % of the copy. A cache line moves between two cores in 0.05 us; a transfer
// adds the registration, the line that announces it and the transfer's record.
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <numeric>
#include <thread>

#include "allocator/kv_memory.h"
#include "base/clock.h"
#include "base/memory.h"
#include "base/random.h"
#include "disagg/handover/transfer_plan.h"
#include "disagg/transport/shared_memory.h"
#include "disagg/transport/transports.h"
#include "experiments/bench/harness.h"
#include "experiments/connect_and_wait.h"
#include "experiments/stats.h"

namespace xpyd::experiments {
namespace {

constexpr size_t kPoolBytes = size_t(128) << 20;  // four times the last-level cache
constexpr size_t kBlockBytes = 64 << 10;
constexpr PeerId kPoster = 1, kOwner = 2;

// The bench pins its thread, and new threads inherit that. This lets them run on every cpu again.
void run_anywhere() {
  cpu_set_t all;
  std::memset(&all, 0xff, sizeof all);
  pthread_setaffinity_np(pthread_self(), sizeof all, &all);
}
void pin_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(size_t(cpu), &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

std::shared_ptr<std::byte> plain_memory(size_t bytes) { return cpu_device().allocate(bytes).value(); }
std::shared_ptr<std::byte> shared_memory(size_t bytes) { return shared_pool_memory(bytes).value(); }

// Two transports in this process, and a registration of all of the owner's pool.
struct MeasuredTransport {
  MeasuredTransport(decltype(make_shm_transport)* make, std::shared_ptr<std::byte> (*memory)(size_t),
                    int connections = 1)
      : source(memory(kPoolBytes)), destination(memory(kPoolBytes)) {
    Random random(3);
    auto* words = reinterpret_cast<uint64_t*>(source.get());
    for (size_t i = 0; i < kPoolBytes / 8; ++i) words[i] = random.next();
    TransportOptions options{.queue = &cpu_queue(), .clock = &clock, .connections = connections};
    std::thread([&] {
      run_anywhere();
      options.self = kPoster, options.regions = {{source.get(), kPoolBytes}};
      poster = make(options).value();
      options.self = kOwner, options.regions = {{destination.get(), kPoolBytes}};
      owner = make(options).value();
      XPYD_CHECK(connect_and_wait(*poster, kOwner, owner->address()).ok());
      XPYD_CHECK(connect_and_wait(*owner, kPoster, poster->address()).ok());
    }).join();
    const MemoryRange all(destination.get(), kPoolBytes);
    key = owner->open(kPoster, KvOp::write, {&all, 1}).value();
    order.resize(kPoolBytes / kBlockBytes);
    std::iota(order.begin(), order.end(), 0u);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    for (size_t i = 0; i < order.size(); ++i) {
      const size_t to = order[(i * 7 + 3) % order.size()];
      plan.copies.push_back(
          {source.get() + order[i] * kBlockBytes, poster->remote(kOwner, 0) + to * kBlockBytes, kBlockBytes});
    }
    plan.bytes = kPoolBytes;
  }
  void send() {
    const TransferId id = poster->post({kOwner, KvOp::write, key}, plan);
    TransferState state;
    while ((state = poster->poll(id)) == TransferState::in_flight) usleep(20);
    XPYD_CHECK(state == TransferState::done);
  }
  std::string wrong() const {  // checks every block against the plan
    for (const Copy& copy : plan.copies) {
      const size_t at = size_t(copy.destination - poster->remote(kOwner, 0));
      if (std::memcmp(destination.get() + at, copy.source, copy.bytes) != 0)
        return "a received block differs from the block sent";
    }
    return "";
  }
  std::string check() {
    std::memset(destination.get(), 0, kPoolBytes);
    send();
    return wrong();
  }
  RealClock clock;
  std::shared_ptr<std::byte> source, destination;
  std::unique_ptr<KvTransport> poster, owner;
  RemoteKey key;
  std::vector<size_t> order;
  TransferPlan plan;
};

// KV of 4,096 tokens in one pool that two memories share.
struct Handoff {
  Handoff() {
    KvOptions options;
    options.shape = {.n_layers = 16, .n_kv_heads = 8, .head_dim = 64, .dtype = Dtype::bf16};
    options.pool_bytes = kPoolBytes + (1 << 20);
    options.max_sequence_tokens = 4096;
    const KvScheme* scheme = find_kv_scheme("paged");
    auto pool = make_block_pool("paged", options).value();
    a = scheme->make(pool, options);
    b = scheme->make(pool, options);
    for (int i = 0; i < 4096; ++i) tokens.push_back(i * 7 % 1000);
    handle = a->reserve(tokens, 0).value().handle;
    XPYD_CHECK(a->append(handle, 4096));
    a->commit(handle, tokens);
  }
  void pass() {
    handle = b->handoff().adopt(a->handoff().hand_over(handle), tokens, 0);
    std::swap(a, b);
  }
  std::string check() {
    const std::vector<int32_t> before(a->blocks(handle).begin(), a->blocks(handle).end());
    pass();
    const auto after = a->blocks(handle);
    const bool same = std::equal(before.begin(), before.end(), after.begin(), after.end());
    return same && a->written_tokens(handle) == 4096
               ? ""
               : "the destination has other blocks or lengths than were handed over";
  }
  std::unique_ptr<KvMemory> a, b;
  std::vector<int32_t> tokens;
  KvHandle handle = kNoKv;
};

void bench_copies(Bench& bench) {
  MeasuredTransport shm(make_shm_transport, shared_memory);
  Handoff handoff;
  const Copy whole{shm.source.get(), shm.poster->remote(kOwner, 0), kPoolBytes};
  const auto one_copy = [&] { copy_streaming({&whole, 1}); };
  const auto with_memcpy = [&] {
    for (const Copy& copy : shm.plan.copies) std::memcpy(copy.destination, copy.source, copy.bytes);
  };
  const auto ok = [] { return std::string(); };
  const Work bytes{.bytes = double(kPoolBytes)};
  const auto send = [&] { shm.send(); };
  bench.measure({
      {.name = "one non-temporal copy, 128 MiB", .run = one_copy, .check = ok, .work = bytes, .limit = Limit::none},
      {.name = "memcpy of 2,048 blocks of 64 KiB",
       .run = with_memcpy,
       .check = ok,
       .work = bytes,
       .limit = Limit::none},
      {.name = "shm: 2,048 blocks of 64 KiB",
       .run = send,
       .check = [&] { return shm.check(); },
       .work = bytes,
       .limit = Limit::none,
       .target = 0.92,
       .versus = {"one non-temporal copy, 128 MiB"}},
      {.name = "shm: the same blocks",
       .run = send,
       .check = [&] { return shm.check(); },
       .work = bytes,
       .limit = Limit::none,
       .target = 1.6,
       .versus = {"memcpy of 2,048 blocks of 64 KiB"}},
      {.name = "handoff: 4,096 tokens",
       .run = [&] { handoff.pass(); },
       .check = [&] { return handoff.check(); },
       .limit = Limit::none,
       .target = 20,
       .versus = {"shm: 2,048 blocks of 64 KiB"}},
  });
}

// The planner: 2 * 16 layers * 128 blocks, none adjacent to another.
void bench_plan(Bench& bench) {
  const KvShape shape{.n_layers = 16, .n_kv_heads = 8, .head_dim = 64, .dtype = Dtype::bf16};
  const KvLayout layout{shape, KvOrder::layer_major, 16, 512};
  std::vector<int32_t> from, to;
  for (int i = 0; i < 128; ++i) from.push_back((i * 37) % 512), to.push_back((i * 91 + 5) % 512);
  std::byte* const pool = nullptr;  // addresses only
  TransferPlan plan;
  const auto run = [&] {
    plan_transfer({pool, &layout, from.data()}, {pool, &layout, to.data()}, {0, 2048, 0, 16}, plan);
  };
  run();
  const size_t n = plan.copies.size();
  XPYD_CHECK(n == 2 * 16 * 128);
  std::vector<double> seconds;
  RealClock clock;
  for (int round = 0; round < 200; ++round) {
    const double start = clock.now();
    run();
    seconds.push_back((clock.now() - start) / double(n));
  }
  std::sort(seconds.begin(), seconds.end());
  const auto share = [&](double p) { return 0.2e-6 / percentile(seconds, p); };
  bench.report({.name = "plan: one descriptor, of 4,096",
                .n_threads = 1,
                .rounds = 200,
                .seconds = percentile(seconds, 50),
                .measure = "x 0.2 us",
                .share = share(50),
                .share_p10 = share(90),
                .share_p90 = share(10),
                .target = 1});
}

// A plain loop of blocking sockets over the same memory, 1 MiB at a time: the most that the tcp transport could reach.
class BareLoop {
 public:
  BareLoop(const std::byte* source, std::byte* destination) : source_(source) {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in at{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof at;
    auto* address = reinterpret_cast<sockaddr*>(&at);
    XPYD_CHECK(bind(listener, address, length) == 0 && listen(listener, 1) == 0 &&
               getsockname(listener, address, &length) == 0);
    fd_ = socket(AF_INET, SOCK_STREAM, 0);
    XPYD_CHECK(connect(fd_, address, length) == 0);
    const int other = accept(listener, nullptr, nullptr);
    close(listener);
    receiver_ = std::thread([other, destination] {
      run_anywhere();
      for (size_t at_byte = 0;;) {
        const ssize_t n = recv(other, destination + at_byte, std::min(kPoolBytes - at_byte, kChunk), 0);
        if (n <= 0) break;
        at_byte += size_t(n);
        if (at_byte < kPoolBytes) continue;
        at_byte = 0;
        if (send(other, "!", 1, MSG_NOSIGNAL) != 1) break;
      }
      close(other);
    });
  }
  ~BareLoop() {
    close(fd_);
    receiver_.join();
  }
  void send_all() {
    for (size_t at = 0; at < kPoolBytes;) {
      const ssize_t n = send(fd_, source_ + at, std::min(kPoolBytes - at, kChunk), MSG_NOSIGNAL);
      XPYD_CHECK(n > 0);
      at += size_t(n);
    }
    char answer;
    XPYD_CHECK(recv(fd_, &answer, 1, 0) == 1);
  }

 private:
  static constexpr size_t kChunk = 1 << 20;
  const std::byte* source_;
  int fd_ = -1;
  std::thread receiver_;
};

void bench_tcp(Bench& bench) {
  MeasuredTransport one(make_tcp_transport, plain_memory, 1), four(make_tcp_transport, plain_memory, 4);
  Buffer bare_destination(kPoolBytes);
  BareLoop bare(one.source.get(), bare_destination.data());
  const Work bytes{.bytes = double(kPoolBytes)};
  const std::string loop = "a bare loop of sockets, 128 MiB by 1 MiB";
  const auto anywhere = [](auto run) {  // the poster's own thread only waits
    return [run] {
      cpu_set_t mine;
      pthread_getaffinity_np(pthread_self(), sizeof mine, &mine);
      run_anywhere();
      run();
      pthread_setaffinity_np(pthread_self(), sizeof mine, &mine);
    };
  };
  bench.measure({
      {.name = loop,
       .run = anywhere([&] { bare.send_all(); }),
       .check =
           [&] {
             bare.send_all();
             return std::memcmp(bare_destination.data(), one.source.get(), kPoolBytes) == 0
                        ? ""
                        : "the received bytes differ from the bytes sent";
           },
       .work = bytes,
       .limit = Limit::none},
      {.name = "tcp: 2,048 blocks of 64 KiB, 1 connection",
       .run = anywhere([&] { one.send(); }),
       .check = [&] { return one.check(); },
       .work = bytes,
       .limit = Limit::none,
       .target = 0.98,
       .versus = {loop}},
      {.name = "tcp: 2,048 blocks of 64 KiB, 4 connections",
       .run = anywhere([&] { four.send(); }),
       .check = [&] { return four.check(); },
       .work = bytes,
       .limit = Limit::none,
       .target = 0.98,
       .versus = {loop}},
  });

  std::vector<double> shares, seconds;
  RealClock clock;
  run_anywhere();
  for (int round = 0; round < std::min(bench.options().rounds, 7); ++round) {
    const double iperf = iperf3_gbps();
    if (iperf <= 0) break;
    const double start = clock.now();
    int sent = 0;
    for (; clock.now() < start + 1; ++sent) one.send();
    seconds.push_back((clock.now() - start) / sent);
    shares.push_back(double(kPoolBytes) / seconds.back() * 1e-9 / iperf);
  }
  if (shares.empty()) {
    std::printf("no comparison with iperf3: it is not installed or does not run here\n");
    return;
  }
  std::sort(shares.begin(), shares.end()), std::sort(seconds.begin(), seconds.end());
  bench.report({.name = "tcp: 2,048 blocks of 64 KiB, 1 connection",
                .n_threads = 1,
                .rounds = int(shares.size()),
                .seconds = percentile(seconds, 50),
                .gbps = double(kPoolBytes) / percentile(seconds, 50) * 1e-9,
                .measure = "x iperf3 -l 1M",
                .share = percentile(shares, 50),
                .share_p10 = percentile(shares, 10),
                .share_p90 = percentile(shares, 90),
                .target = 0.75});
}

// Two processes pass one transfer back and forth; both spin on arrived().
constexpr int kBounces = 20000;

struct BounceEnd {
  BounceEnd(PeerId self, PeerId other_, int read_fd_, int write_fd_)
      : memory(shared_memory(1 << 20)), other(other_), read_fd(read_fd_), write_fd(write_fd_) {
    transport = make_shm_transport(
                    {.regions = {{memory.get(), 1 << 20}}, .queue = &cpu_queue(), .clock = &clock, .self = self})
                    .value();
    char address[100] = {};
    transport->address().copy(address, sizeof address - 1);
    exchange(address, sizeof address);
    XPYD_CHECK(connect_and_wait(*transport, other, address).ok());
    const MemoryRange all(memory.get(), 1 << 20);
    mine = transport->open(other, KvOp::write, {&all, 1}).value();
    uint32_t key[] = {mine.index, mine.generation};
    exchange(reinterpret_cast<char*>(key), sizeof key);
    theirs = {key[0], key[1], 0};
    plan.copies = {{memory.get(), transport->remote(other, 0) + 4096, 64}};
    plan.bytes = 64;
  }
  void exchange(char* bytes, size_t n) {
    XPYD_CHECK(write(write_fd, bytes, n) == ssize_t(n));
    XPYD_CHECK(read(read_fd, bytes, n) == ssize_t(n));
  }
  void post() {
    XPYD_CHECK(transport->poll(transport->post({other, KvOp::write, theirs}, plan)) == TransferState::done);
  }
  void wait_for(int n) {
    while (transport->arrived(mine) < n) __builtin_ia32_pause();
  }
  RealClock clock;
  std::shared_ptr<std::byte> memory;
  const PeerId other;
  const int read_fd, write_fd;
  std::unique_ptr<KvTransport> transport;
  RemoteKey mine, theirs;
  TransferPlan plan;
};

void bench_notification(Bench& bench) {
  int to_child[2], to_parent[2];
  XPYD_CHECK(pipe(to_child) == 0 && pipe(to_parent) == 0);
  std::fflush(stdout);
  // The child uses no lock that another thread of this process may hold.
  const pid_t child = fork();
  XPYD_CHECK(child >= 0);
  if (child == 0) {
    pin_to(1);
    BounceEnd end(kOwner, kPoster, to_child[0], to_parent[1]);
    for (int i = 1; i <= kBounces; ++i) {
      end.wait_for(i);
      end.post();
    }
    _exit(0);
  }
  std::vector<double> one_way;
  std::thread([&] {
    pin_to(0);
    BounceEnd end(kPoster, kOwner, to_parent[0], to_child[1]);
    RealClock clock;
    for (int i = 1; i <= kBounces; ++i) {
      const double start = clock.now();
      end.post();
      end.wait_for(i);
      one_way.push_back((clock.now() - start) / 2);
    }
  }).join();
  int status;
  waitpid(child, &status, 0);
  for (int fd : {to_child[0], to_child[1], to_parent[0], to_parent[1]}) close(fd);
  std::sort(one_way.begin(), one_way.end());
  const auto share = [&](double p) { return 1e-6 / percentile(one_way, p); };
  bench.report({.name = "shm: 64 B posted, arrived() in another process",
                .n_threads = 1,
                .rounds = kBounces,
                .seconds = percentile(one_way, 50),
                .measure = "x 1 us",
                .share = share(50),
                .share_p10 = share(90),
                .share_p90 = share(10),
                .target = 1});
}

void bench_transports(Bench& bench) {
  if (bench.max_threads() >= 2)
    bench_notification(bench);
  else
    std::printf("notification not run: it needs two CPUs\n");
  bench_plan(bench);
  bench_copies(bench);
  bench_tcp(bench);
}

REGISTER_BENCH("wires", bench_transports);

}  // namespace
}  // namespace xpyd::experiments

#include "tests/rdma_vm/bare.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "base/clock.h"
#include "disagg/transport/rdma/rdma_verbs.h"

namespace xpyd::testing {
namespace {

constexpr int kRounds = 1000, kWarm = 200;
constexpr double kPatienceSeconds = 30;

struct Note {
  rdma::NicPortEnd posting, serving;
  uint64_t base;
  uint32_t key;
};

void need(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "rdma_speed: %s\n", what);
  std::exit(1);
}

// For a process that spins: the other one may have ended. The clock is read so seldom that it costs nothing.
class Patience {
 public:
  void spin() {
    if (++spins_ % 1024 == 0) need(clock_.now() < end_, "nothing came from the other process");
  }

 private:
  RealClock clock_;
  const double end_ = clock_.now() + kPatienceSeconds;
  unsigned spins_ = 0;
};

// Waits for the next completion of a queue.
void completion(ibv_cq* queue) {
  ibv_wc found;
  int n;
  for (Patience patience; (n = ibv_poll_cq(queue, 1, &found)) == 0;) patience.spin();
  need(n == 1 && found.status == IBV_WC_SUCCESS, "a request failed");
}

}  // namespace

void bare_latency(const std::string& device, int socket, bool poster, bool notice) {
  const auto memory = cpu_device().allocate(4096).value();
  volatile auto* words = reinterpret_cast<volatile uint64_t*>(memory.get());
  TransportOptions options;
  options.regions = {{memory.get(), 4096}};
  options.nics = {device};
  auto nic_ports = rdma::open_nic_ports(options);
  need(nic_ports.ok(), "no device");
  rdma::NicPort& nic_port = nic_ports.value()[0];
  auto posting = rdma::make_queues(nic_ports.value(), 1, rdma::Role::post);
  auto serving = rdma::make_queues(nic_ports.value(), 1, rdma::Role::serve);
  need(posting.ok() && serving.ok(), "no queue pairs");
  const rdma::MemoryRegion open(
      ibv_reg_mr(nic_port.protection.get(), memory.get(), 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
  need(open != nullptr, "no registration");
  const Note ours{posting.value()[0].end, serving.value()[0].end, reinterpret_cast<uint64_t>(memory.get()), open->rkey};
  Note theirs;
  const auto exchange = [&] {
    need(write(socket, &ours, sizeof ours) == ssize_t(sizeof ours) &&
             recv(socket, &theirs, sizeof theirs, MSG_WAITALL) == ssize_t(sizeof theirs),
         "the other process ended");
  };
  exchange();
  need(rdma::connect_queues(nic_ports.value(), posting.value(), {theirs.serving}).ok() &&
           rdma::connect_queues(nic_ports.value(), serving.value(), {theirs.posting}).ok(),
       "not connected");
  exchange();

  std::vector<double> halves;
  RealClock clock;
  uint64_t sent = 0, seen = 0;
  const auto post = [&] {
    if (sent > 0) completion(nic_port.sends.get());
    words[1] = ++sent;
    ibv_sge piece{ours.base + 8, 8, nic_port.regions[0]->lkey};
    ibv_send_wr request{}, *bad = nullptr;
    request.sg_list = &piece, request.num_sge = 1;
    request.opcode = notice ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
    request.imm_data = htonl(1);
    request.send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
    request.wr.rdma = {theirs.base, theirs.key};
    need(ibv_post_send(posting.value()[0].pair.get(), &request, &bad) == 0, "no post");
  };
  const auto arrival = [&] {
    ++seen;
    if (notice) {
      completion(nic_port.serving.get());
      if (seen % uint64_t(nic_port.receive_batch) == 0) rdma::post_receives(nic_port, nic_port.receive_batch);
    }
    for (Patience patience; words[0] != seen; patience.spin()) need(!notice, "a notice came before its bytes");
  };
  double start = clock.now();
  for (int round = 0; round < kWarm + kRounds; ++round) {
    if (!poster) arrival();
    post();
    if (!poster) continue;
    arrival();
    const double now = clock.now();
    if (round >= kWarm) halves.push_back((now - start) / 2 * 1e6);
    start = now;
  }
  exchange();
  if (!poster) return;
  std::sort(halves.begin(), halves.end());
  std::printf("%.2f %.2f\n", halves[halves.size() / 2], halves[0]);
}

}  // namespace xpyd::testing

// rdma: What rate and latency does the rdma transport reach by message size, over one NIC and two, compared with
//   perftest's programs?
// Paper: no figure of these sizes; perftest on the same devices is the bound.
// Set-up: beside perftest's ib_write_bw and ib_write_lat. /kv: the KV of a prompt by layer, by chunk and by request,
//   over one NIC and over two. Two transports in this process, polled in turn, use the RDMA devices of this machine.
//   `make check STAGE=rdma` runs it in a virtual machine with Soft-RoCE; its figures say nothing about a card. Every
//   byte is compared before a row is reported.
// Command: make exp-rdma (it has not run yet; measured).
// Expected: a transfer is one write per piece and one word that completes it. So a stream of pieces of 64 KiB has
//   perftest's rate less a 64th: .95 to 1.05 of it. A write of 8 bytes until arrived() is two writes: 1 to 1.3 times
//   theirs. KV of 1,024 tokens of Llama-3.1-8B is 134 MB in pieces of 32 KiB at any grain. 32 transfers by layer and
//   one by request differ by 31 words: 1 to 1.05. After the last piece is computed, a 32nd remains by layer, a quarter
//   by chunk of 256, and all by request. Two NICs share a transfer's pieces: half of the time if the link is the limit,
//   the same if one processor drives both (Soft-RoCE).
// Found: not run on a card yet.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

#include "base/device/device.h"
#include "base/random.h"
#include "disagg/transport/transports.h"
#include "experiments/experiment.h"
#include "experiments/stats.h"

namespace xpyd::experiments::rdma_experiment {
namespace {

using namespace disagg;

constexpr PeerId kPoster = 1, kOwner = 2;

std::vector<std::string> devices() {
  std::vector<std::string> names;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/class/infiniband", none))
    names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

bool installed(const std::string& program) {
  return std::system(("command -v " + program + " >/dev/null").c_str()) == 0;
}

// Two ends, and a registration of all of the owner's memory.
class Pair {
 public:
  Pair(size_t bytes, int nics) {
    std::vector<std::string> names = devices();
    names.resize(size_t(nics));
    for (auto [end, self] : {std::pair(&poster_, kPoster), {&owner_, kOwner}}) {
      end->memory = cpu_device().allocate(bytes).value();
      TransportOptions options{.queue = &cpu_queue(), .clock = &clock};
      options.regions = {{end->memory.get(), bytes}}, options.self = self, options.nics = names;
      Result<std::unique_ptr<KvTransport>> made = make_rdma_transport(options);
      if (!made) {
        wrong = made.error().message;
        return;
      }
      end->transport = std::move(made).value();
    }
    for (bool there = false, here = false; !there || !here;) {
      const Result<bool> a = poster_.transport->connect(kOwner, owner_.transport->address()),
                         b = owner_.transport->connect(kPoster, poster_.transport->address());
      if (!a || !b) {
        wrong = (a ? b : a).error().message;
        return;
      }
      there = a.value(), here = b.value();
    }
    const MemoryRange all(owner_.memory.get(), bytes);
    registration_ = owner_.transport->open(kPoster, KvOp::write, {&all, 1}).value();
    Random random(5);
    auto* words = reinterpret_cast<uint64_t*>(poster_.memory.get());
    for (size_t i = 0; i < bytes / 8; ++i) words[i] = random.next();
  }

  // Posts pieces of `piece` bytes that begin at these places.
  TransferId post(const std::vector<size_t>& places, size_t piece) {
    TransferPlan plan;
    for (size_t at : places)
      plan.copies.push_back({poster_.memory.get() + at, poster_.transport->remote(kOwner, 0) + at, piece});
    plan.bytes = places.size() * piece;
    ++posts_;
    return poster_.transport->post({kOwner, KvOp::write, registration_, 0}, plan);
  }
  // Waits until the owner has counted all transfers and they are done. A transfer advances when it is polled, so both
  // ends are polled.
  void wait(std::vector<TransferId> ids) {
    const double until = clock.now() + 60;
    while (wrong.empty() && (owner_.transport->arrived(registration_) < posts_ || !ids.empty())) {
      std::erase_if(ids, [&](TransferId id) {
        const TransferState state = poster_.transport->poll(id);
        if (state != TransferState::in_flight && state != TransferState::done) wrong = "a transfer failed";
        return state != TransferState::in_flight;
      });
      if (clock.now() > until) wrong = "a post did not arrive within 60 s";
    }
  }
  bool equal(size_t at, size_t bytes) const {
    return std::memcmp(poster_.memory.get() + at, owner_.memory.get() + at, bytes) == 0;
  }

  RealClock clock;
  std::string wrong;

 private:
  struct End {
    std::shared_ptr<std::byte> memory;
    std::unique_ptr<KvTransport> transport;
  };
  End poster_, owner_;
  RemoteKey registration_;
  int posts_ = 0;
};

namespace messages {

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  const auto n = int(devices().size());
  for (int bytes : setting.tiny ? std::vector{8, 65536} : std::vector{8, 4096, 65536, 1 << 20, 4 << 20})
    for (int nics = 1; nics <= std::min(n, 2); ++nics) {
      all.push_back({{"who", "xpyd"}, {"bytes", bytes}, {"nics", nics}});
      if (nics == 1 && installed("ib_write_bw")) all.push_back({{"who", "perftest"}, {"bytes", bytes}, {"nics", nics}});
    }
  return all;
}

// Runs a perftest program against itself on this machine. Returns the number in this column of its table.
Result<double> perftest(const std::string& program, int bytes, int n, int column) {
  const std::string one = program + " -d " + devices()[0] + " -x 1 -s " + std::to_string(bytes) + " -n " +
                          std::to_string(n);
  const std::string command =
      "(" + one + " >/dev/null 2>&1 &); for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.3; " + one +
      " 127.0.0.1 2>/dev/null && break; done | grep -E '^ *[0-9]+ +[0-9]+ ' | tail -n 1 | awk '{print $" +
      std::to_string(column) + "}'";
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return Error{ErrorCode::io, command + ": cannot start it"};
  double number = 0;
  const bool read = std::fscanf(pipe, "%lf", &number) == 1;
  pclose(pipe);
  if (!read) return Error{ErrorCode::unavailable, program + " printed no number"};
  return number;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const int bytes = point["bytes"], n = setting.tiny ? 40 : bytes > 65536 ? 200 : 1000;
  if (point["who"] == "perftest") {
    const Result<double> mib_per_s = perftest("ib_write_bw", bytes, n, 4), us = perftest("ib_write_lat", bytes, n, 5);
    if (!mib_per_s) return mib_per_s.error();
    if (!us) return us.error();
    return Finding{{{{"gbps", mib_per_s.value() * (1 << 20) * 1e-9}, {"us", us.value()}}}, ""};
  }
  constexpr size_t kAhead = 8;
  const size_t stride = 2 * size_t(bytes);  // no two pieces are adjacent
  Pair pair(kAhead * stride, point["nics"]);
  if (!pair.wrong.empty()) return Error{ErrorCode::unavailable, pair.wrong};
  std::vector<size_t> places(kAhead);
  for (size_t i = 0; i < kAhead; ++i) places[i] = i * stride;
  std::vector<double> us;
  for (int i = 0; i < n; ++i) {
    const double start = pair.clock.now();
    pair.wait({pair.post({places[size_t(i) % kAhead]}, size_t(bytes))});
    if (i >= n / 5) us.push_back(1e6 * (pair.clock.now() - start));  // the first ones touch all memory
  }
  std::ranges::sort(us);
  const double start = pair.clock.now();
  std::vector<TransferId> under_way;
  for (int i = 0; i < n / int(kAhead); ++i) {
    under_way.push_back(pair.post(places, size_t(bytes)));
    if (under_way.size() == 4) pair.wait(std::exchange(under_way, {}));
  }
  pair.wait(under_way);
  const double seconds = pair.clock.now() - start;
  Finding found{
      {{{"gbps", 1e-9 * bytes * double(n / int(kAhead) * int(kAhead)) / seconds}, {"us", summarize(us).mean}}},
      pair.wrong};
  for (size_t at : places)
    if (!pair.equal(at, size_t(bytes))) found.wrong = "the received bytes differ from the bytes sent";
  return found;
}

REGISTER_EXPERIMENT("rdma", "cpu", points, each<run>);

}  // namespace messages

namespace kv {

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  const auto n = int(devices().size());
  for (const char* grain : {"layer", "chunk", "request"})
    for (int nics = 1; nics <= std::min(n, 2); ++nics) all.push_back({{"grain", grain}, {"nics", nics}});
  return all;
}

// Blocks of 16 tokens of Llama-3.1-8B in layer_major: a piece is K or V of one layer.
Result<Finding> run(const Values& point, const Setting& setting) {
  const int tokens = setting.tiny ? 64 : 1024, layers = setting.tiny ? 4 : 32, chunk = setting.tiny ? 32 : 256,
            rounds = 5;
  constexpr int kBlock = 16;
  constexpr size_t kPiece = size_t(kBlock) * 8 * 128 * 2;
  const std::string grain = point["grain"];
  const int blocks = tokens / kBlock;
  const size_t bytes = size_t(blocks) * size_t(2 * layers) * kPiece;
  Pair pair(bytes, point["nics"]);
  if (!pair.wrong.empty()) return Error{ErrorCode::unavailable, pair.wrong};
  // Transfers in the order in which their KV is computed.
  std::vector<std::vector<size_t>> posts;
  const auto add = [&](int block, int end, int layer, int layer_end) {
    std::vector<size_t> places;
    for (; block < end; ++block)
      for (int plane = 2 * layer; plane < 2 * layer_end; ++plane)
        places.push_back((size_t(block) * size_t(2 * layers) + size_t(plane)) * kPiece);
    posts.push_back(std::move(places));
  };
  if (grain == "layer")
    for (int layer = 0; layer < layers; ++layer) add(0, blocks, layer, layer + 1);
  else
    for (int at = 0, step = grain == "chunk" ? chunk / kBlock : blocks; at < blocks; at += step)
      add(at, at + step, 0, layers);
  std::vector<double> all_s, last_s;
  for (int round = 0; round <= rounds; ++round) {
    std::vector<TransferId> ids;
    const double start = pair.clock.now();
    for (size_t i = 0; i + 1 < posts.size(); ++i) ids.push_back(pair.post(posts[i], kPiece));
    pair.wait(ids);
    const double last = pair.clock.now();
    pair.wait({pair.post(posts.back(), kPiece)});
    if (round == 0) continue;  // the warm-up touches all memory
    all_s.push_back(pair.clock.now() - start), last_s.push_back(pair.clock.now() - last);
  }
  if (pair.wrong.empty() && !pair.equal(0, bytes)) pair.wrong = "the received bytes differ from the bytes sent";
  return Finding{{{{"posts", posts.size()},
                   {"bytes", bytes},
                   {"ms", 1e3 * summarize(all_s).mean},
                   {"gbps", 1e-9 * double(bytes) / summarize(all_s).mean},
                   {"last_ms", 1e3 * summarize(last_s).mean}}},  // after the last piece was computed
                 pair.wrong};
}

REGISTER_EXPERIMENT("rdma/kv", "cpu", points, each<run>);

}  // namespace kv

}  // namespace
}  // namespace xpyd::experiments::rdma_experiment

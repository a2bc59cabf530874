// Moving KV: between the pools of a prefill and a decode instance on one card (as --transport local and handoff do),
// and to pinned host memory and back (as a host tier does). Each list of copies stands beside one copy of as many
// bytes.
//
// Expected for an 8-billion-parameter Llama (32 layers, 8 KV heads of 128, bf16): 128 KiB a token. Pieces are 32 KiB
// for blocks of 16 in layer_major, 2 KiB for blocks of 1, and 2 MiB in token_major. On the card one thread block reads
// and writes a piece, so 4,096 tokens are 1 GiB of traffic: 0.35 ms at 3 TB/s. Over PCIe 5 x16 they are 512 MiB: 9.8 ms
// at 55 GB/s.
#include <cstring>
#include <numeric>

#include "allocator/kv/kv_copy.h"
#include "base/device/device_cuda.h"
#include "base/random.h"
#include "experiments/gpu/rounds.h"
#include "model/cuda/peak_cuda.h"

namespace xpyd::experiments::gpu {
namespace {

constexpr uint64_t kSource = 21;  // an array of random_element()

struct Side {
  KvOrder order;
  int block;  // tokens per block
};

// The KV of one sequence, with blocks in random order.
struct Sequence {
  Sequence(const KvShape& shape, const Side& side, int tokens, std::shared_ptr<std::byte> memory, uint64_t seed)
      : layout{shape, side.order, side.block, tokens / side.block}, table(size_t(layout.n_blocks)), pool(memory) {
    std::iota(table.begin(), table.end(), 0);
    Random random(seed);
    for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[random.below(i)]);
  }
  KvView view() const { return {pool.get(), &layout, table.data(), 0}; }
  KvLayout layout;
  std::vector<int32_t> table;
  std::shared_ptr<std::byte> pool;
};

// A list of copies on a queue, timed on the rounds' stream: the queue starts when that stream reaches it, and the
// stream waits for the queue.
class Moves {
 public:
  Moves(Rounds& rounds, DeviceQueue& queue, const std::byte* source, std::vector<Copy> copies)
      : rounds_(rounds), queue_(queue), source_(source), copies_(std::move(copies)) {}
  void run() {
    begin_.record(rounds_.stream());
    begin_.hold(stream_of(queue_));
    queue_.copy(copies_, false);
    end_.record(stream_of(queue_));
    end_.hold(rounds_.stream());
  }
  // Checks that the first, the middle and the last copy arrived. Then overwrites their destinations, so that the next
  // list must write them again.
  std::string check() {
    rounds_.stream().wait();
    for (size_t i : {size_t(0), copies_.size() / 2, copies_.size() - 1}) {
      const Copy& copy = copies_[i];
      cuda::Memory got = cuda::Memory::pinned(copy.bytes);
      cuda::copy(got.data(), copy.destination, copy.bytes, rounds_.stream());
      rounds_.stream().wait();
      const size_t first = size_t(copy.source - source_) / sizeof(bf16);
      for (size_t e = 0; e < copy.bytes / sizeof(bf16); ++e)
        if (got.as<bf16>()[e].bits != random_element(kSource, first + e).bits)
          return "element " + std::to_string(e) + " of copy " + std::to_string(i) + " differs from the source";
      std::memset(got.data(), 0xff, got.size());
      cuda::copy(copy.destination, got.data(), got.size(), rounds_.stream());
      rounds_.stream().wait();
    }
    return "";
  }
  size_t bytes() const {
    return std::accumulate(copies_.begin(), copies_.end(), size_t(0),
                           [](size_t n, const Copy& c) { return n + c.bytes; });
  }

 private:
  Rounds& rounds_;
  DeviceQueue& queue_;
  const std::byte* source_;
  std::vector<Copy> copies_;
  cuda::Event begin_, end_;
};

}  // namespace

void kv_transfer(Rounds& rounds, bool tiny) {
  const KvShape shape{tiny ? 2 : 32, tiny ? 1 : 8, 128, Dtype::bf16};
  const int tokens = tiny ? 64 : 4096;
  const size_t bytes = size_t(tokens) * shape.token_bytes();
  std::unique_ptr<Device> device = make_cuda_device();
  const std::shared_ptr<std::byte> first = device->allocate(bytes).value(), second = device->allocate(bytes).value(),
                                   host = device->allocate_host(bytes).value();
  std::unique_ptr<DeviceQueue> on_card = device->make_queue(), bus = device->make_copy_queue(0);
  constexpr Side kBlocks{KvOrder::layer_major, 16}, kSingles{KvOrder::layer_major, 1}, kWide{KvOrder::token_major, 16};
  struct Way {
    const char* name;
    std::shared_ptr<std::byte> from, to;
    bool over_bus;
  };
  for (const Way& way : {Way{"on the card", first, second, false}, Way{"card to pinned host", first, host, true},
                         Way{"pinned host to card", host, second, true}}) {
    fill_random(first.get(), bytes / sizeof(bf16), kSource, 1, rounds.stream());
    cuda::copy(host.get(), first.get(), bytes, rounds.stream());
    const std::string of = "KV of " + std::to_string(tokens) + " tokens " + way.name + ", ", whole = of + "one copy";
    std::vector<std::unique_ptr<Moves>> moves;
    std::vector<Case> cases = {{.name = whole,
                                .run = [&] { cuda::copy(way.to.get(), way.from.get(), bytes, rounds.stream()); },
                                .work = {.bytes = double(bytes) * (way.over_bus ? 1 : 2)},
                                .limit = way.over_bus ? Limit::none : Limit::copy}};
    for (auto [name, from, to] :
         {std::tuple("blocks of 16 to blocks of 16, layer_major", kBlocks, kBlocks),
          {"blocks of 16 to blocks of 16, token_major", kWide, kWide},
          {"blocks of 1 to blocks of 1, layer_major", kSingles, kSingles},
          {"blocks of 16 to one block, layer_major", kBlocks, Side{KvOrder::layer_major, tokens}}}) {
      const Sequence source(shape, from, tokens, way.from, 5), destination(shape, to, tokens, way.to, 6);
      std::vector<Copy> copies;
      allocator::add_copies(source.view(), destination.view(), {0, tokens, 0, shape.n_layers}, copies);
      moves.push_back(
          std::make_unique<Moves>(rounds, way.over_bus ? *bus : *on_card, way.from.get(), std::move(copies)));
      Moves& these = *moves.back();
      XPYD_CHECK(these.bytes() == bytes);
      cases.push_back({.name = of + name,
                       .run = [&these] { these.run(); },
                       .check = [&these] { return these.check(); },
                       .work = cases[0].work,
                       .limit = cases[0].limit,
                       .versus = whole});
    }
    rounds.measure(cases);
  }
  rounds.bench().write_files();
}

}  // namespace xpyd::experiments::gpu

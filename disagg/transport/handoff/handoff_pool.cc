#include "disagg/transport/handoff/handoff_pool.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "allocator/pool/block_pool.h"
#include "allocator/schemes.h"
#include "base/clock.h"
#include "base/device/device.h"
#include "base/log.h"
#include "base/os.h"
#include "disagg/transport/shared_memory.h"

namespace xpyd::disagg {
namespace {

constexpr uint64_t kPoolMagic = 0x326c6f6f70647078;  // "xpdpool2"
constexpr size_t kPage = 4096;
constexpr int kPatienceSeconds = 5;
constexpr std::string_view kKind = "handoff:";
constexpr size_t kMostAddressBytes = 100;  // of a Unix socket's name
constexpr size_t kMostFiles = 2;           // the ledger's and a card's

// The file has this header in its first page, then the ledger, and without a card the KV from the next huge page on.
// Locks of the members are on the first bytes and do not change them.
struct PoolHeader {
  uint64_t magic;
  int32_t n_layers, n_kv_heads, head_dim, dtype, order, block_tokens, n_blocks, n_instances;
  int32_t tp, pp;
  uint64_t pool_bytes;
  char card[64];  // MemoryExporter::identity(); empty: the KV is in the file
};

std::unique_ptr<Bootstrap> make_bootstrap() {
  const auto log = [](const std::string& text) { log_line(LogLevel::warning, "xpyd: KV pool: %s", text.c_str()); };
  return std::make_unique<Bootstrap>("handoff", 0, kPoolMagic, transport_limits(0, kMostFiles), nullptr, log);
}

// Everything that follows from the options.
struct Plan {
  PoolHeader header = {};
  KvLayout whole;               // layout of the blocks as on one rank
  std::vector<size_t> offsets;  // [n_ranks] start of each rank's KV, relative to the first
  size_t kv_bytes = 0;          // of all ranks
  size_t rank_bytes = 0;        // … without the gaps between ranks
  size_t block_bytes = 0;       // of one block on all ranks

  size_t kv_offset() const { return round_up(kPage + BlockLedger::bytes(whole.n_blocks), kHugePage); }
};

// This function and those below throw an Error if the options do not fit.
Plan make_plan(const std::string& scheme_name, KvOptions options, int n_instances, const KvShards& shards) {
  XPYD_CHECK(!find_kv_scheme(scheme_name)->page_groups);  // refused earlier
  if (__builtin_mul_overflow(options.pool_bytes, size_t(n_instances), &options.pool_bytes))
    throw invalid("--kv-bytes: the pool of all instances together exceeds the address space");
  const PoolPlan planned = need(plan_ranks(scheme_name, options, shards));
  const KvLayout& l = planned.whole;
  Plan plan;
  plan.whole = l;
  plan.header = {.magic = kPoolMagic,
                 .n_layers = l.shape.n_layers,
                 .n_kv_heads = l.shape.n_kv_heads,
                 .head_dim = l.shape.head_dim,
                 .dtype = int(l.shape.dtype),
                 .order = int(l.order),
                 .block_tokens = l.block_tokens,
                 .n_blocks = l.n_blocks,
                 .n_instances = n_instances,
                 .tp = shards.tp,
                 .pp = shards.pp,
                 .pool_bytes = options.pool_bytes};
  for (const KvOptions& rank : planned.of_ranks) {
    plan.offsets.push_back(round_up(plan.kv_bytes, kHugePage));
    plan.kv_bytes = plan.offsets.back() + rank.pool_bytes;
    plan.rank_bytes += rank.pool_bytes;
    plan.block_bytes += size_t(l.block_tokens) * rank.shape.token_bytes();
  }
  return plan;
}

// Null: the KV is in memory of the host.
MemoryExporter* exporter_of(const KvOptions& options) {
  if (!options.device || options.device == &cpu_device()) return nullptr;
  auto* found = dynamic_cast<MemoryExporter*>(options.device);
  const Status can = found ? found->exports() : Error{ErrorCode::unavailable, "its memory cannot be shared"};
  if (can) return found;
  throw Error{can.error().code, std::string("--device ") + options.device->name() + ": " + can.error().message +
                                    "; expected instances in one process (without --processes), or --device cpu"};
}

// Joins as one of the first n_instances members. It retries for a while: the place of a member that is ending becomes
// free soon, and a process that checks whether a member has ended blocks its place for a moment.
Result<std::unique_ptr<BlockLedger>> join_ledger(std::shared_ptr<std::byte> words, int n_blocks, int n_instances,
                                                 int file) {
  RealClock clock;
  for (const double end = clock.now() + kPatienceSeconds;; clock.sleep(1e-2)) {
    auto ledger = BlockLedger::join(words, n_blocks, file, BlockLedger::As::member);
    if (ledger ? ledger.value()->member() < n_instances : ledger.error().code != ErrorCode::unavailable) return ledger;
    // The longest sequence fits only if each instance has its share of the pool (BlockPool).
    if (clock.now() >= end)
      return Error{ErrorCode::unavailable,
                   "the KV pool of --transport handoff has room for the " + std::to_string(n_instances) +
                       " instances of the conductor's --topology, and all of them are there (or one is still ending)"};
  }
}

std::string where(const std::string& card) { return card.empty() ? "the host" : card; }

}  // namespace

Result<std::unique_ptr<HandoffPool>> HandoffPool::create(const std::string& scheme, const KvOptions& options,
                                                         int n_instances, const KvShards& shards) try {
  Plan plan = make_plan(scheme, options, n_instances, shards);
  MemoryExporter* const card = exporter_of(options);
  auto pool = std::unique_ptr<HandoffPool>(new HandoffPool);
  pool->bytes_ = plan.rank_bytes;
  pool->block_bytes_ = plan.block_bytes;
  if (card) {
    int exported = -1;
    Result<std::shared_ptr<std::byte>> kv = card->allocate_exported(plan.kv_bytes, exported);
    pool->card_file_ = Fd(exported);
    const bool too_large = !kv && kv.error().code == ErrorCode::unavailable;
    pool->card_memory_ = need(std::move(kv), too_large ? "--kv-bytes: " : "");
    std::snprintf(plan.header.card, sizeof plan.header.card, "%s", card->identity().c_str());
  }
  const size_t bytes = plan.kv_offset() + (card ? 0 : plan.kv_bytes);
  const std::shared_ptr<std::byte> memory = need(make_shared_file("xpyd-handoff", bytes, pool->file_), "--kv-bytes: ");
  std::memcpy(memory.get(), &plan.header, sizeof(PoolHeader));
  std::shared_ptr<std::byte> words(memory, memory.get() + kPage);
  pool->ledger_ = need(BlockLedger::join(words, plan.whole.n_blocks, pool->file_.get(), BlockLedger::As::observer));
  pool->bootstrap_ = make_bootstrap();
  const auto give = [p = pool.get()](const ChannelPtr& channel, PeerId) {
    const int files[kMostFiles] = {p->file_.get(), p->card_file_.get()};
    channel->send_files(kFirstFrameType, "", std::span(files, files[1] < 0 ? 1 : kMostFiles));
    return ChannelEvents();
  };
  need(pool->bootstrap_->listen_here(give));
  pool->address_ = pool->bootstrap_->address().substr(kKind.size());
  return pool;
} catch (const Error& error) {
  return error;
}

namespace {

// Gets the descriptors of the pool: the ledger's file, and a card's.
Result<std::vector<Fd>> ask_for_files(const std::string& address) {
  RealClock clock;
  Calls<std::vector<Fd>> calls("handoff", {.clock = &clock, .connect_s = kPatienceSeconds});
  const auto bootstrap = make_bootstrap();
  for (;; clock.sleep(1e-3)) {
    auto met = calls.ask(0, std::string(kKind) + address, [&](const auto& answer) {
      return bootstrap->call(std::string(kKind) + address, 0, answer,
                             [](const ChannelPtr& channel, const auto& wanted) {
                               wanted->channel = held(channel);
                               const auto take = [channel, weak = std::weak_ptr(wanted)](std::string_view) {
                                 if (auto waits = weak.lock()) waits->set(channel->take_files());
                                 return false;  // closes the channel
                               };
                               return hear(channel, take, [] {});
                             });
    });
    if (!met) return met.error();
    if (!met.value()) continue;
    if (met.value()->empty()) return Error{ErrorCode::unavailable, "the conductor's KV pool came without its file"};
    return std::move(*met.value());
  }
}

}  // namespace

Result<JoinedPool> join_handoff_pool(const std::string& address, const std::string& scheme, const KvOptions& options,
                                     const KvShards& shards) try {
  if (address.size() < 2 || address.size() >= kMostAddressBytes || address[0] != '@')
    return invalid("the conductor has no KV pool: expected that it runs with --transport handoff");
  Result<std::vector<Fd>> files = ask_for_files(address);
  if (!files)
    return Error{ErrorCode::unavailable,
                 "the KV pool of --transport handoff cannot be reached (" + files.error().message +
                     "): it can be shared by processes of one host, one network namespace and the conductor's user "
                     "only; expected --transport tcp, rdma or nccl elsewhere"};
  const int file = files.value()[0].get(), of_card = files.value().size() > 1 ? files.value()[1].get() : -1;

  struct stat status;
  if (fstat(file, &status) != 0 || size_t(status.st_size) < kPage)
    return Error{ErrorCode::io, "the file of the KV pool is too short"};
  const size_t bytes = size_t(status.st_size);
  const std::shared_ptr<std::byte> memory = need(map_shared_file(file, bytes));
  PoolHeader there;
  std::memcpy(&there, memory.get(), sizeof there);
  if (there.magic != kPoolMagic || there.n_instances < 1)
    return Error{ErrorCode::io, "the file of the KV pool has no or another version"};
  MemoryExporter* const card = exporter_of(options);
  const std::string own_card = card ? card->identity() : "";
  const std::string its_card(there.card, strnlen(there.card, sizeof there.card));
  if (own_card != its_card)
    return invalid("the KV pool of --transport handoff is in memory of " + where(its_card) + ", but --device here is " +
                   where(own_card) +
                   ": expected the same device for all instances (for cards, see CUDA_VISIBLE_DEVICES)");
  const Plan plan = make_plan(scheme, options, there.n_instances, shards);
  const PoolHeader& h = plan.header;
  for (auto [field, own, conductor] : {std::tuple{"--kv-bytes", long(h.pool_bytes / size_t(h.n_instances)),
                                                  long(there.pool_bytes / size_t(h.n_instances))},
                                       {"layers", h.n_layers, there.n_layers},
                                       {"kv heads", h.n_kv_heads, there.n_kv_heads},
                                       {"head_dim", h.head_dim, there.head_dim},
                                       {"--kv-dtype", h.dtype, there.dtype},
                                       {"--kv-layout", h.order, there.order},
                                       {"tensor-parallel ranks", h.tp, there.tp},
                                       {"pipeline stages", h.pp, there.pp},
                                       {"tokens of a block", h.block_tokens, there.block_tokens},
                                       {"blocks", h.n_blocks, there.n_blocks}})
    if (own != conductor)
      return invalid(std::string("the KV pool of --transport handoff has another shape: ") + field + " is " +
                     std::to_string(own) + " here, " + std::to_string(conductor) + " at the conductor");
  std::shared_ptr<std::byte> kv;  // of all ranks
  if (card) {
    kv = need(card->import(of_card, plan.kv_bytes));
  } else {
    if (bytes < plan.kv_offset() + plan.kv_bytes) return Error{ErrorCode::io, "the file of the KV pool is too short"};
    kv = std::shared_ptr<std::byte>(memory, memory.get() + plan.kv_offset());
  }
  std::shared_ptr<std::byte> words(memory, memory.get() + kPage);
  std::unique_ptr<BlockLedger> ledger = need(join_ledger(words, h.n_blocks, h.n_instances, file));
  std::vector<std::shared_ptr<std::byte>> memories;
  for (size_t offset : plan.offsets) memories.emplace_back(kv, kv.get() + offset);
  auto pool = std::make_shared<BlockPool>(KvPlaces(plan.whole, shards, std::move(memories)),
                                          options.prefix_cache && find_kv_scheme(scheme)->prefix_index,
                                          std::move(ledger), std::max(1, h.n_blocks / h.n_instances));
  if (card) pool->poison_new_blocks(false);  // only the card can write there
  return JoinedPool{std::move(pool), h.n_instances};
} catch (const Error& error) {
  return error;
}

}  // namespace xpyd::disagg

// sharing: A common prefix on contiguous memory can be mapped twice, taken over, or copied. When does each of these
//   beat the others and hashed blocks?
// Paper: vTensor, TurboMind, vLLM's automatic prefix caching; no figure is published.
// Set-up: a common prefix on contiguous memory in three ways, and in hashed blocks. attach: reserve() alone; KV of 32
//   tensors in page groups of 64 KiB (64 tokens). One sequence holds the prefix and eight others attach. Measured: the
//   time of one, and the bytes of all nine with 64 tokens of their own. serve: llama-mini, one request with the prefix,
//   then four at once: their mean TTFT.
// Command: make exp-sharing (a minute; measured).
// Expected: memcpy takes 5.6 us for 64 KiB and 211 for 2 MiB, mmap 10.6 and 173. A copy also maps its own page-group
//   rows, so alias / copy is .65 and .45. Takeover makes no call. Bytes: p + 64 (n + 1) tokens with alias, and with
//   copy (p + 64)(n + 1): .125 at p = 4,096 and n = 8. The TTFT of 1,152 tokens with 128 left to compute falls to about
//   .15.
// Found: mapping 2 MiB twice takes .55 of a copy, a takeover nothing; the nine sequences hold an eighth of the bytes.
#include <chrono>
#include <cstring>

#include "allocator/kv_memory.h"
#include "allocator/kv_pool.h"
#include "experiments/load.h"
#include "experiments/stats.h"

namespace xpyd::experiments::sharing_experiment {
namespace {

constexpr const char* kWays[] = {"off", "blocks", "alias", "takeover", "copy"};
constexpr int kSharers = 8, kOwn = 64;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* way : kWays) {
    if (way != std::string("off"))
      for (int prefix : setting.tiny ? std::vector{64} : std::vector{64, 1024, 4096})
        all.push_back({{"phase", "attach"}, {"way", way}, {"prefix", prefix}});
    all.push_back({{"phase", "serve"}, {"way", way}, {"prefix", setting.tiny ? 64 : 1024}});
  }
  return all;
}

KvShare share_of(const std::string& way) {
  return way == "alias" ? KvShare::alias : way == "takeover" ? KvShare::takeover : KvShare::copy;
}

std::vector<int32_t> prompt_of(int prefix, int own) {
  std::vector<int32_t> tokens(size_t(prefix + kOwn), own + 1);
  for (int i = 0; i < prefix; ++i) tokens[size_t(i)] = i % 251;
  return tokens;
}

// Number of tokens whose KV differs between the two sequences.
int differences(const KvView& a, const KvView& b, int tokens) {
  const KvShape& shape = a.layout->shape;
  int n = 0;
  for (int t = 0; t < tokens; ++t)
    for (int layer : {0, shape.n_layers - 1})
      for (int kv : {0, 1}) n += std::memcmp(a.row(layer, kv, t, 0), b.row(layer, kv, t, 0), shape.row_bytes()) != 0;
  return n;
}

Result<Finding> attach(const std::string& way, int prefix, const Setting& setting) {
  const std::string scheme = way == "blocks" ? "paged" : "vattention";
  KvOptions o;
  o.shape = {.n_layers = setting.tiny ? 2 : 16, .n_kv_heads = 8, .head_dim = 64, .dtype = Dtype::bf16};
  o.max_sequence_tokens = prefix + 2 * kOwn;
  o.vattention.max_sequences = 2 * (kSharers + 1);
  o.vattention.map_ahead = false;
  o.vattention.share = share_of(way);
  const int tokens = prefix + kOwn + 64;
  o.pool_bytes = size_t(kSharers + 2) * size_t(tokens + 64) * o.shape.token_bytes();
  auto pool = make_block_pool(scheme, o);
  if (!pool) return pool.error();
  // Touches all pages before timing, because the system zeroes a page at its first use.
  KvOptions once = o;
  once.prefix_cache = false;
  {
    const auto warm = find_kv_scheme(scheme)->make(pool.value(), once);
    for (int n = kSharers + 2; n > 0; --n) {
      Result<KvReservation> r = warm->reserve(prompt_of(prefix, 0), 0);
      if (!r || !warm->append(r.value().handle, prefix + kOwn)) break;
    }
  }
  const auto kv = find_kv_scheme(scheme)->make(pool.value(), o);
  // One donor, or for takeover one for each sharer.
  std::vector<KvHandle> donors;
  for (int i = 0; i < (way == "takeover" ? kSharers : 1); ++i) {
    const auto prompt = prompt_of(prefix, 100 + i);
    Result<KvReservation> r = kv->reserve(prompt, 0);
    if (!r || !kv->append(r.value().handle, int(prompt.size()) - r.value().cached_tokens))
      return invalid("the pool is too small");
    const KvView view = kv->view(r.value().handle);
    for (int t = 0; t < int(prompt.size()); ++t)
      for (int layer = 0; layer < o.shape.n_layers; ++layer)
        for (int head : {0, 7})
          for (int side : {0, 1})
            std::memset(view.row(layer, side, t, head), prompt[size_t(t)] + layer, o.shape.row_bytes());
    kv->commit(r.value().handle, std::span<const int32_t>(prompt).subspan(size_t(r.value().cached_tokens)));
    donors.push_back(r.value().handle);
  }
  if (way == "takeover")
    for (KvHandle donor : donors) kv->free(donor);
  std::vector<double> us;
  std::vector<KvHandle> sharers;
  int wrong = 0;
  for (int i = 0; i < kSharers; ++i) {
    const auto prompt = prompt_of(prefix, i);
    const auto start = std::chrono::steady_clock::now();
    Result<KvReservation> r = kv->reserve(prompt, 0);
    us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
    if (!r || r.value().cached_tokens != prefix) return Finding{{}, "the prefix was not found"};
    if (!kv->append(r.value().handle, kOwn)) return Finding{{}, "the pool has no free memory for a sharer"};
    if (way != "takeover") wrong += differences(kv->view(donors[0]), kv->view(r.value().handle), prefix);
    kv->commit(r.value().handle, std::span<const int32_t>(prompt).last(kOwn));
    sharers.push_back(r.value().handle);
  }
  for (KvHandle s : sharers)  // after the donors have ended, each other's
    wrong += differences(kv->view(sharers[0]), kv->view(s), prefix);
  kv->check_invariants();
  if (wrong > 0) return Finding{{}, "the KV that a sharer reads differs from the KV that the donor wrote"};
  const KvStats stats = kv->stats();
  const double held = double(stats.capacity_bytes - stats.idle_bytes - stats.external_bytes);
  return Finding{{{{"attach_us", summarize(us).mean},
                   {"held_mib", held / (1 << 20)},
                   {"map_calls", stats.vattention.map_calls},
                   {"prefix_mib", double(prefix) * double(o.shape.token_bytes()) / (1 << 20)},
                   {"ttft_ms", ""},
                   {"hit_share", ""},
                   {"logits_hash", ""}}},
                 ""};
}

Result<Finding> serve(Bed& bed, const std::string& way, int prefix, const Setting& setting) {
  std::vector<std::string> options = {"--topology", "1C", "--chunk-tokens", "512"};
  if (way == "blocks") {
    options.insert(options.end(), {"--allocator", "paged"});
  } else {
    options.insert(options.end(), {"--allocator", "vattention", "--kv-share", way});
  }
  Result<std::string> wrong = bed.open(options);
  if (!wrong) return wrong.error();
  if (!wrong.value().empty()) return Finding{{}, wrong.value()};
  const int own = setting.tiny ? 16 : 128;
  const auto all = shared_prefix_load(5, 1, prefix, own, 2, setting.seed).requests;
  Run first = run_load(bed.build(), {all[0]}, {});
  Run rest = run_load(bed.build(), {all.begin() + 1, all.end()}, std::vector<double>(4, 0.0));
  for (const std::string& w : {first.wrong, rest.wrong})
    if (!w.empty()) return Finding{{}, w};
  char hash[20];
  std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(rest.logits_hash));
  return Finding{{{{"attach_us", ""},
                   {"held_mib", ""},
                   {"map_calls", ""},
                   {"prefix_mib", ""},
                   {"ttft_ms", summarize(rest.ttft_ms).mean},
                   {"hit_share", rest.hit_share},
                   {"logits_hash", hash}}},
                 ""};
}

Measure open(const Setting& setting) {
  auto bed = std::make_shared<Bed>(
      setting, setting.tiny ? std::vector<std::string>{"experiments/models/llama-tiny", "--kv-bytes", "4MiB",
                                                       "--page-group-bytes", "4KiB"}
                            : std::vector<std::string>{"experiments/models/llama-mini", "--kv-bytes", "256MiB",
                                                       "--max-model-len", "2048", "--max-batch", "16"});
  return [=](const Values& point) -> Result<Finding> {
    const std::string way = point["way"];
    const int prefix = point["prefix"];
    return point["phase"] == "attach" ? attach(way, prefix, setting) : serve(*bed, way, prefix, setting);
  };
}

REGISTER_EXPERIMENT("sharing", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::sharing_experiment

// radix: what does a prefix cache by token find beyond one by blocks, and what does it cost, by the tokens of a block?
//
// Loads on the server's own memory (`paged`), no model: prompts are looked up, given room, written and freed, as an
// engine does. Chats: sessions in random turns, each with one of 16 system prompts, every prompt all that was said
// before. Questions: groups that share a prompt and go their ways behind it. All lengths are ragged, so a prefix ends
// anywhere in a block of b tokens. And the beginning of Mooncake's trace, which names blocks of 512 tokens (each is
// made up of its id here) and so cannot say what is lost within one: all b that divide 512 find the same.
//
// Arithmetic. A prefix that ends anywhere loses (b - 1) / 2 tokens to whole blocks: 7.5 of 16, 63.5 of 128, at every
// hit, and a tree none: so much is computed once more where a tree copies it. SGLang with page_size b matches whole
// pages (match_prefix cuts the key to pages, _key_match_paged compares them), so it finds what its tree by token finds,
// rounded down, and so does a hash of blocks: no request may differ. A chat's next turn goes on in the block where the
// last one ended: nothing is copied but at a session's first turn, one hit in 12, if the prompt does not end with a
// block.
// What a tree pays: every sequence's last block stays, (b - 1) / 2 of its rows unfilled, and where two part the rows
// before that in the block are there twice. Chats have 3,800 tokens of their own: at 16 15 / 3,800 more, 0.4 %; at 128
// 3 %. Questions have 170 beside 125 of their group's: at 128 127 / (295 + 127) are 30 %.
// Where only half of the tokens fit, a question that nobody asks again leaves 297 rows at 128 with a tree and 170 with
// blocks, and pushes out what others share so much sooner: with 192 groups of 1,000 the last 260 questions' groups are
// there and not the last 360's, .74 and .85 of them, a tenth fewer hits than by token; a thirteenth fewer than blocks
// of 128, which lose 6 % themselves. At 16 tokens a tree loses 1 % of that.
// Look-up: a hash of blocks hashes all, 0.8 ns a token at 16 (allocator/README.md), and looks into three cache lines
// for each block: 2 ns a token at 16, eight times that and more at 1. A tree compares 4 bytes a token, 0.3 to 1 ns from
// memory, and steps from edge to edge, whatever b is.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>

#include "allocator/block_pool.h"
#include "base/random.h"
#include "experiments/experiment.h"
#include "experiments/simulate/traces.h"

namespace xpyd::experiments::radix_experiment {
namespace {

using namespace allocator;

struct Request {
  std::vector<int32_t> tokens;  // prompt and answer
  int prompt;
};

std::vector<int32_t> text(Random& random, int tokens) {
  std::vector<int32_t> all(static_cast<size_t>(tokens));
  for (int32_t& t : all) t = int32_t(random.below(128'000));
  return all;
}
int between(Random& random, int low, int high) { return low + int(random.below(uint64_t(high - low + 1))); }

void say(Request& request, Random& random, int question, int answer) {
  const std::vector<int32_t> asked = text(random, question), answered = text(random, answer);
  request.tokens.insert(request.tokens.end(), asked.begin(), asked.end());
  request.prompt = int(request.tokens.size());
  request.tokens.insert(request.tokens.end(), answered.begin(), answered.end());
}

std::vector<Request> chats(bool tiny, uint64_t seed) {
  Random random(seed);
  const int n_sessions = tiny ? 5 : 200, turns = 12;
  std::vector<std::vector<int32_t>> systems;
  for (int i = 0; i < 16; ++i) systems.push_back(text(random, between(random, 1000, 3000)));
  std::vector<Request> sessions, all;
  for (int s = 0; s < n_sessions; ++s) sessions.push_back({systems[random.below(16)], 0});
  std::vector<int> order;
  for (int i = 0; i < n_sessions * turns; ++i) order.push_back(i % n_sessions);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  for (int s : order) {
    say(sessions[size_t(s)], random, between(random, 20, 300), between(random, 20, 300));
    all.push_back(sessions[size_t(s)]);
  }
  return all;
}

std::vector<Request> questions(bool tiny, uint64_t seed) {
  Random random(seed + 1);
  std::vector<std::vector<int32_t>> groups;
  for (int i = 0; i < (tiny ? 3 : 192); ++i) groups.push_back(text(random, between(random, 400, 1600)));
  std::vector<Request> all;
  for (int i = 0; i < (tiny ? 30 : 1536); ++i) {
    Request request{groups[random.below(groups.size())], 0};
    say(request, random, between(random, 20, 160), between(random, 20, 140));
    all.push_back(std::move(request));
  }
  return all;
}

Result<std::vector<Request>> mooncake(const std::string& folder, bool tiny) {
  const disagg::TraceFormat& format = *disagg::find_trace_format("mooncake");
  Result<disagg::Trace> trace = format.load(folder + "/mooncake_conversation.jsonl", {.limit = tiny ? 10 : 300});
  if (!trace) return trace.error();
  std::vector<Request> all;
  for (const disagg::TraceRequest& r : trace.value().requests) {
    Request request;
    for (uint64_t id : r.blocks) {
      Random random(id);
      const std::vector<int32_t> block = text(random, format.block_tokens);
      request.tokens.insert(request.tokens.end(), block.begin(), block.end());
    }
    request.tokens.resize(size_t(request.prompt = r.prompt_tokens));
    Random random(all.size() + 77);
    const std::vector<int32_t> answer = text(random, std::min(r.output_tokens, 400));
    request.tokens.insert(request.tokens.end(), answer.begin(), answer.end());
    all.push_back(std::move(request));
  }
  return all;
}

struct Cache {
  Cache(int block_tokens, bool radix, int64_t room) {
    KvOptions o{.shape = {.n_layers = 1, .n_kv_heads = 1, .head_dim = 1, .dtype = Dtype::bf16},
                .block_tokens = block_tokens,
                .radix = radix};
    o.pool_bytes = size_t(room / block_tokens) * size_t(block_tokens) * o.shape.token_bytes();
    pool = std::dynamic_pointer_cast<BlockPool>(make_block_pool("paged", o).value());
    kv = find_kv_scheme("paged")->make(pool, o);
  }
  const RadixTree* tree() const { return dynamic_cast<const RadixTree*>(pool->index()); }
  // As an engine: what is found, and whether its last rows were copied.
  std::pair<int, bool> run(std::span<const int32_t> tokens, int prompt) {
    const int64_t copies = kv->stats().cow_copies;
    const KvReservation r = kv->reserve(tokens.first(size_t(prompt)), 0).value();
    const std::span<const int32_t> rest = tokens.subspan(size_t(r.cached_tokens));
    XPYD_CHECK(kv->append(r.handle, int(rest.size())));
    kv->written(r.handle, rest);
    kv->free(r.handle);
    return {r.cached_tokens, kv->stats().cow_copies > copies};
  }
  int64_t filled() const {
    int64_t sum = 0;
    const std::vector<KvState> states = kv->states();
    for (size_t b = 0; b < states.size(); ++b) sum += states[b] == KvState::cached ? pool->filled(int32_t(b)) : 0;
    return sum;
  }
  std::shared_ptr<BlockPool> pool;
  std::unique_ptr<KvMemory> kv;
};

struct Load {
  std::vector<Request> requests;
  std::vector<int> longest;  // that begins like an earlier one, never a prompt's last token: by looking at all of them
  int64_t tokens = 0;        // distinct
};

Load look(std::vector<Request> requests) {
  Load load{.requests = std::move(requests), .longest = {}};
  std::vector<const Request*> before;
  for (const Request& r : load.requests) {
    int best = 0;
    for (const Request* b : before) {
      const size_t n = std::min(b->tokens.size(), size_t(r.prompt));
      // One that parts earlier than the best so far need not be walked.
      if (n <= size_t(best) || b->tokens[size_t(best)] != r.tokens[size_t(best)]) continue;
      best = std::max(best,
                      int(std::mismatch(b->tokens.begin(), b->tokens.begin() + ptrdiff_t(n), r.tokens.begin()).first -
                          b->tokens.begin()));
    }
    load.longest.push_back(std::min(best, r.prompt - 1));
    load.tokens += int64_t(r.tokens.size()) - best;
    before.push_back(&r);
  }
  return load;
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* load : {"chats", "questions", "mooncake"})
    for (int block : {1, 4, 16, 32, 64, 128})
      for (const char* cache : {"blocks", "radix"})
        for (const char* room : {"all", "half"}) {
          const bool trace = load == std::string("mooncake");
          if (trace && (setting.traces.empty() || room == std::string("half"))) continue;
          all.push_back({{"load", load}, {"block", block}, {"cache", cache}, {"room", room}});
        }
  return all;
}

Measure open(const Setting& setting) {
  auto loads = std::make_shared<std::map<std::string, Load>>();
  return [=](const Values& point) -> Result<Finding> {
    const std::string name = point["load"];
    if (!loads->count(name)) {
      Result<std::vector<Request>> requests = name == "mooncake" ? mooncake(setting.traces, setting.tiny)
                                              : name == "chats"  ? chats(setting.tiny, setting.seed)
                                                                 : questions(setting.tiny, setting.seed);
      if (!requests) return requests.error();
      (*loads)[name] = look(std::move(requests).value());
    }
    const Load& load = loads->at(name);
    const int block = point["block"];
    const bool radix = point["cache"] == std::string("radix"), all = point["room"] == std::string("all");
    int64_t room = load.tokens / 2, longest = 0, kept = 0;
    for (const Request& r : load.requests) longest = std::max(longest, int64_t(r.tokens.size()));
    // Every sequence may end in a block of its own, and part from another within one.
    if (all) room = load.tokens + int64_t(load.requests.size()) * 2 * block + longest;
    Cache cache(block, radix, room);
    int64_t hits = 0, hit_tokens = 0, copies = 0, rows_copied = 0, prompt_tokens = 0, lost = 0, differ = 0;
    for (size_t i = 0; i < load.requests.size(); ++i) {
      const Request& r = load.requests[i];
      const auto [hit, copied] = cache.run(r.tokens, r.prompt);
      // What SGLang finds with page_size 1, or with pages of these blocks.
      const int rule = radix ? load.longest[i] : load.longest[i] / block * block;
      prompt_tokens += r.prompt, hit_tokens += hit, differ += hit != rule;
      hits += load.longest[i] > 0, lost += load.longest[i] - hit;
      copies += copied, rows_copied += copied ? hit % block : 0;
    }
    cache.kv->check_invariants();
    Values row = {{"requests", load.requests.size()},
                  {"prompt_tokens", prompt_tokens},
                  {"hits", hits},
                  {"hit_tokens", hit_tokens},
                  {"lost_per_hit", double(lost) / double(std::max<int64_t>(1, hits))},
                  {"copies", copies},
                  {"rows_copied", rows_copied},
                  {"evictions", cache.kv->stats().evictions}};
    // Where everything fits the rule must hold, and what is kept is counted.
    for (const char* column : {"differ", "rows", "unfilled", "twice", "kept", "probe_ns_per_token"}) row[column] = "";
    if (!all) return Finding{{row}, ""};
    row["differ"] = differ;
    const int64_t blocks = cache.kv->stats().cached;
    if (radix) {
      kept = cache.tree()->size();
      if (kept != load.tokens) return Finding{{}, "the tree has other tokens than the load"};
    } else {  // whole blocks of each
      Cache whole(1, true, load.tokens + longest);
      for (const Request& r : load.requests) {
        const int n = int(r.tokens.size()) / block * block;
        if (n > 0) whole.run(std::span(r.tokens).first(size_t(n)), n);
      }
      kept = whole.tree()->size();
    }
    row["rows"] = blocks * block;
    row["unfilled"] = double(blocks * block - cache.filled()) / double(blocks * block);
    row["twice"] = double(cache.filled() - kept) / double(blocks * block);
    row["kept"] = double(kept) / double(load.tokens);
    double best = 1e9;
    for (int repeat = 0; repeat < 3; ++repeat) {
      int64_t found = 0;
      const auto begin = std::chrono::steady_clock::now();
      for (const Request& r : load.requests) found += cache.kv->probe(std::span(r.tokens).first(size_t(r.prompt)), 0);
      const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
      best = std::min(best, spent.count() / double(found));
    }
    row["probe_ns_per_token"] = best;
    return Finding{{row}, ""};
  };
}

REGISTER_EXPERIMENT("radix", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::radix_experiment

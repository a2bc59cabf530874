// Requests generated from a seed with published marginals. They stand in for traces that cannot be had here.

#include <algorithm>
#include <cmath>
#include <queue>

#include "base/row_hash.h"
#include "experiments/simulate/arrivals.h"
#include "experiments/simulate/traces.h"

namespace xpyd::disagg {
namespace {

double lognormal(Random& random, double median, double sigma) {
  return median * std::exp(sigma * normal_sample(random));
}

int clamped(double tokens, double max) { return int(std::clamp(tokens, 1.0, max)); }

// Fills in the prompt's blocks: `shared` tokens named by `prefix`, then the session's own tokens. A partial last block
// is unique.
void add_blocks(TraceRequest& request, int block_tokens, uint64_t prefix, int shared, uint64_t session,
                uint64_t number) {
  for (int at = 0; at < request.prompt_tokens; at += block_tokens) {
    const int end = at + block_tokens;
    const uint64_t whose = end > request.prompt_tokens ? chain_hash(number, 3)
                           : end <= shared             ? chain_hash(prefix, 1)
                                                       : chain_hash(session, 2);
    request.blocks.push_back(chain_hash(whose, uint64_t(at)));
  }
}

}  // namespace

// Mooncake's tool&agent trace (FAST'25) has 23,608 requests in an hour, with means of 8,596 prompt tokens and 182
// answer tokens. Its requests begin with one of four first blocks, which 10,938, 9,203, 3,449 and 18 of them have. The
// first block belongs to chats, whose later turns repeat the earlier prompts. The second and third belong to tools,
// with shared prompts of 12 and 5 blocks and few tokens of their own. Requests come in ticks of 3 s. An unlimited cache
// finds .553 of the tokens; LRU caches of 1, 5, 10, 25 and 50 % of the blocks find .346, .449, .508, .551 and .552.
// Shares of tokens here are within .015 of these, and means within 3 % (tests/experiments/traces_test.cc).
Trace generate_tool_agent(const TraceOptions& options) {
  constexpr int kBlock = 512, kChat = 0;
  constexpr int kRequests[] = {10938, 9203, 3449, 18};
  constexpr int kSharedBlocks[] = {1, 12, 5, 1};
  constexpr double kNextTurn = .36;                    // share of chats that continue
  constexpr double kPauseS = 145, kPauseSigma = .85;   // s from one turn to the next
  constexpr double kFirst = 6700, kFirstSigma = 1.05;  // tokens of a chat's first prompt
  constexpr double kLongest = 126000;
  struct Turn {
    double due_s;
    int said_tokens;
    uint64_t session;
    int index;
    bool operator<(const Turn& other) const { return due_s > other.due_s; }  // the earliest turn is on top
  };
  Random random(mix_seed(options.seed, 21));
  std::vector<int> kinds;
  for (int kind = 0; kind < 4; ++kind) kinds.insert(kinds.end(), size_t(kRequests[kind]), kind);
  for (size_t i = kinds.size(); i > 1; --i) std::swap(kinds[i - 1], kinds[random.below(i)]);
  Trace trace{.block_tokens = kBlock};
  trace.notes.push_back(
      "generated: it has the marginal distributions of Mooncake's tool&agent trace, but is not that trace");
  std::priority_queue<Turn> turns;  // turns that are still to come
  int n_sessions = 0;
  for (const int kind : kinds) {
    const double at_s = 3 * std::floor(double(trace.requests.size()) * 1200 / double(kinds.size()));
    TraceRequest request{.arrival_s = at_s};
    const int shared = kSharedBlocks[kind] * kBlock;
    uint64_t session = uint64_t(trace.requests.size()) + (1u << 30);
    if (kind == kChat) {
      Turn turn{at_s, 0, uint64_t(n_sessions), -1};
      if (!turns.empty() && turns.top().due_s <= at_s) {
        turn = turns.top();
        turns.pop();
        request.after = turn.index;
        request.think_s = at_s - trace.requests[size_t(turn.index)].arrival_s;
        request.prompt_tokens = clamped(turn.said_tokens + lognormal(random, 300, 1), kLongest);
      } else {
        ++n_sessions;
        request.prompt_tokens = clamped(std::max(lognormal(random, kFirst, kFirstSigma), 890.), kLongest);
      }
      request.session = int(session = turn.session);
      request.output_tokens = clamped(lognormal(random, 295, .7), 2000);
      if (random.uniform() < kNextTurn)
        turns.push({at_s + lognormal(random, kPauseS, kPauseSigma), request.prompt_tokens + request.output_tokens,
                    turn.session, int(trace.requests.size())});
    } else {
      const bool brief = random.uniform() < .4;  // short calls get longer answers
      const double own = kind == 1 ? (brief ? 25 + 15 * random.uniform() : 30 + 830 * random.exponential())
                                   : 430 + 180 * random.exponential();
      request.prompt_tokens = clamped(shared + own, kLongest);
      request.output_tokens = kind == 1 && !brief ? 3 : 15 + int(random.below(20));
    }
    add_blocks(request, kBlock, uint64_t(kind), shared, session, trace.requests.size());
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

// ServeGen (NSDI'26): the load of a pool of different clients. A client's rate falls with a power of its rank, so a few
// clients send most requests. Each client has gamma-distributed gaps with its own coefficient of variation, lognormal
// prompts with a Pareto tail, exponential answers, and a system prompt that begins a share of its requests.
Trace generate_client_pool(const TraceOptions& options) {
  constexpr int kBlock = 64;
  constexpr double kRank = 1.2;                         // exponent of the rates
  constexpr double kTailShare = .05, kTailShape = 1.5;  // of prompts: Pareto, from twice the client's median
  constexpr double kLongest = 128000, kLongestAnswer = 8000;
  struct Client {
    Random random{};
    double gap_s, shape;  // of the gaps: their mean, and the shape of the gamma distribution
    double prompt, prompt_sigma, answer, system, system_share, next_s;
    double gap() { return gamma_sample(random, shape) / shape * gap_s; }
  };
  double weights = 0;
  for (int c = 1; c <= options.clients; ++c) weights += std::pow(c, -kRank);
  std::vector<Client> clients;
  auto later = [&](int a, int b) { return clients[size_t(a)].next_s > clients[size_t(b)].next_s; };
  std::priority_queue<int, std::vector<int>, decltype(later)> next(later);
  for (int c = 1; c <= options.clients; ++c) {
    Random r(mix_seed(mix_seed(options.seed, 22), uint64_t(c)));
    Client client{.gap_s = weights * std::pow(c, kRank) / options.rate};
    client.shape = std::pow(lognormal(r, 1.5, .5), -2);  // from the coefficient of variation
    client.prompt = lognormal(r, 700, .8), client.prompt_sigma = .3 + .6 * r.uniform();
    client.answer = lognormal(r, 250, .6);
    client.system = clamped(lognormal(r, 500, 1), 8000), client.system_share = r.uniform();
    client.random = r;
    client.next_s = client.gap() * client.random.uniform();  // at 0, each client is within a gap
    clients.push_back(client);
    next.push(c - 1);
  }
  Trace trace{.block_tokens = kBlock};
  trace.notes.push_back("generated: a pool of " + std::to_string(options.clients) + " clients");
  for (uint64_t n = options.limit > 0 ? uint64_t(options.limit) : 10000, i = 0; i < n; ++i) {
    const int c = next.top();
    next.pop();
    Client& client = clients[size_t(c)];
    Random& r = client.random;
    const double own = r.uniform() < kTailShare ? 2 * client.prompt / std::pow(1 - r.uniform(), 1 / kTailShape)
                                                : lognormal(r, client.prompt, client.prompt_sigma);
    const int shared = r.uniform() < client.system_share ? int(client.system) : 0;
    TraceRequest request{.arrival_s = client.next_s, .prompt_tokens = clamped(shared + own, kLongest)};
    request.output_tokens = clamped(1 + client.answer * r.exponential(), kLongestAnswer);
    add_blocks(request, kBlock, uint64_t(c), shared, i, i);
    trace.requests.push_back(std::move(request));
    client.next_s += client.gap();
    next.push(c);
  }
  return trace;
}

}  // namespace xpyd::disagg

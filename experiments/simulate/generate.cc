// Requests made by seed with published marginals, for traces that cannot be had here.

#include <algorithm>
#include <cmath>
#include <queue>

#include "base/arrivals.h"
#include "base/row_hash.h"
#include "experiments/simulate/traces.h"

namespace xpyd::disagg {
namespace {

double lognormal(Random& random, double median, double sigma) {
  return median * std::exp(sigma * normal_sample(random));
}

int clamped(double tokens, double max) { return int(std::clamp(tokens, 1.0, max)); }

// The prompt's blocks: `shared` tokens that `prefix` names, then the session's own. The partial tail is nobody else's.
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

// Mooncake's tool&agent trace (FAST'25; 23,608 requests in an hour, prompts of 8,596 tokens and answers of 182 in the
// mean): four first blocks with 10,938, 9,203, 3,449 and 18 requests. The first is of chats, whose later turns repeat
// the earlier ones' prompts; the second and third are tools' prompts of 12 and 5 blocks with little of their own
// behind. Requests come in ticks of 3 s. An endless cache finds .553 of it; of the most recently used 1, 5, 10, 25 and
// 50 % of its blocks: .346, .449, .508, .551 and .552. Shares of tokens here come within .015 of these, and means
// within 3 % (tests/experiments/traces_test.cc).
Trace generate_tool_agent(const TraceOptions& options) {
  constexpr int kBlock = 512, kChat = 0;
  constexpr int kRequests[] = {10938, 9203, 3449, 18};
  constexpr int kSharedBlocks[] = {1, 12, 5, 1};
  constexpr double kNextTurn = .36;                    // of chats
  constexpr double kPauseS = 145, kPauseSigma = .85;   // from a turn to the next
  constexpr double kFirst = 6700, kFirstSigma = 1.05;  // tokens of a chat's first prompt
  constexpr double kLongest = 126000;
  struct Turn {
    double due_s;
    int said_tokens;
    uint64_t session;
    int index;
    bool operator<(const Turn& other) const { return due_s > other.due_s; }  // the queue's top is the earliest
  };
  Random random(mix_seed(options.seed, 21));
  std::vector<int> kinds;
  for (int kind = 0; kind < 4; ++kind) kinds.insert(kinds.end(), size_t(kRequests[kind]), kind);
  for (size_t i = kinds.size(); i > 1; --i) std::swap(kinds[i - 1], kinds[random.below(i)]);
  Trace trace{.block_tokens = kBlock};
  trace.notes.push_back("generated with the marginals of Mooncake's tool&agent trace; not that trace");
  std::priority_queue<Turn> turns;  // that are to come
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
      const bool brief = random.uniform() < .4;  // a tool's call that says little, and gets a longer answer
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

// ServeGen (NSDI'26): load as a pool of clients that differ. Rates fall off as a power of the client's rank (a few send
// most); each has gaps of a gamma distribution with its own coefficient of variation, prompts of a lognormal body with
// a Pareto tail, exponential answers, and a system prompt that a share of its requests begins with.
Trace generate_client_pool(const TraceOptions& options) {
  constexpr int kBlock = 64;
  constexpr double kRank = 1.2;                         // exponent of rates
  constexpr double kTailShare = .05, kTailShape = 1.5;  // of prompts: Pareto from twice the client's median
  constexpr double kLongest = 128000, kLongestAnswer = 8000;
  struct Client {
    Random random{};
    double gap_s, shape;  // of gaps: mean, and the gamma distribution's
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
    client.shape = std::pow(lognormal(r, 1.5, .5), -2);  // of its coefficient of variation
    client.prompt = lognormal(r, 700, .8), client.prompt_sigma = .3 + .6 * r.uniform();
    client.answer = lognormal(r, 250, .6);
    client.system = clamped(lognormal(r, 500, 1), 8000), client.system_share = r.uniform();
    client.random = r;
    client.next_s = client.gap() * client.random.uniform();  // a gap is under way at 0
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

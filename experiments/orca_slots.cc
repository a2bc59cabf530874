// orca_slots: what contiguous memory holds where each sequence's is reserved when it comes, by how well its length is
// known: Orca's three (PagedAttention, SOSP'23, section 6.1), beside blocks of 16.
//
//   max         2,048 tokens, the most that the model takes
//   pow2        its prompt, and for its output the next power of two (25 tokens: 32), at most 2,048 of both
//   pow2_whole  the same, more than 2,048 of both where it comes to that
//   oracle      its prompt and its output, which somebody knows
//   blocks      blocks of 16 as it grows; when none is left, who came last begins again
//
// Orca's memory is handed out by a buddy allocator, as the paper has it: pieces are powers of two. OPT-13B's pool of
// waste.cc, 15,728 tokens: the pieces of 8,192, 4,096, 2,048, 1,024, 256, 64, 32 and 16 that it consists of. Nobody
// computes: a step is a token of every sequence, the first one with its prompt; who came first gets memory first, and
// waits until a piece is free. 2,000 requests wait from the beginning. Over the steps while somebody waits, of the
// pool:
//   useful    holds KV
//   reserved  will hold KV before its sequence ends
//   internal  was asked for, and its sequence will never fill it
//   external  the rest of a piece, and pieces that are free and too small for who waits
//
// Arithmetic. ShareGPT's lengths: a sequence of o tokens is there for o steps, and holds 450 tokens in their mean
// (waste.cc) of the 161 + 600 with which it ends: .59. A piece of a power of two is 1 / (2 ln 2) = .72 full of what was
// asked for, if sizes are spread evenly over an octave, and for the first in the queue, whose size is some 500, a
// twentieth to a tenth of the pool stays free. Oracle: .59 * .72 * .92 = .39, .32 to .44, external .28 to .40. Pow2:
// 2^k is 1.39 times o, and a prompt on top of a power of two needs the next one, so that pieces are (1 + p / 2^k) / 2
// full, .65: 450 / (161 + 835) of .65 of .92 are .27, .21 to .32, external .33 to .47. Max: 7 of 2,048, .91 of the
// pool, 450 / 2,048 of these: .20. Batches are as the means of pieces: 7, pow2 15,728 * .92 / 1,530 = 9.5, oracle
// 15,728 * .92 / 1,060 = 13.7, and blocks 15,728 / 458 = 34: 1.2 to 1.6 times 7, 1.6 to 2.2 times, and blocks 2.1 to
// 2.8 times oracle. Alpaca's sequences end with 19 + 115 tokens: pieces of 190 (oracle) and 300 (pow2), 76 and 48 of
// them: 8 to 14 times 7, and 5 to 9 times.
#include <algorithm>
#include <bit>
#include <deque>
#include <set>

#include "experiments/experiment.h"
#include "experiments/lengths.h"

namespace xpyd::experiments::orca_slots_experiment {
namespace {

constexpr int kPoolTokens = 15728, kMaxLen = 2048, kBlock = 16, kRequests = 2000;

// Pieces of 2^k tokens at a multiple of their size; two neighbours that made one piece become one again.
class Buddies {
 public:
  explicit Buddies(int tokens) {
    for (int at = 0; at < tokens;) {
      const int piece = int(std::bit_floor(unsigned(tokens - at)));
      free_[std::countr_zero(unsigned(piece))].insert(at);
      tops_.push_back({at, piece});
      at += piece;
    }
  }

  // Where a piece of at least `tokens` begins, cut from the smallest that is there; -1: none.
  int take(int tokens) {
    const int order = order_of(tokens);
    int from = order;
    while (from < kOrders && free_[from].empty()) ++from;
    if (from == kOrders) return -1;
    const int at = *free_[from].begin();
    free_[from].erase(free_[from].begin());
    for (; from > order; --from) free_[from - 1].insert(at + (1 << (from - 1)));
    return at;
  }

  void give_back(int at, int tokens) {
    const Top& top = *std::find_if(tops_.begin(), tops_.end(), [&](const Top& t) { return at < t.at + t.tokens; });
    for (int order = order_of(tokens);; ++order) {
      const int buddy = top.at + ((at - top.at) ^ (1 << order));
      if (1 << order == top.tokens || free_[order].erase(buddy) == 0) {
        free_[order].insert(at);
        return;
      }
      at = std::min(at, buddy);
    }
  }

  int free_tokens() const {
    int sum = 0;
    for (int order = 0; order < kOrders; ++order) sum += int(free_[order].size()) << order;
    return sum;
  }

 private:
  static constexpr int kOrders = 15;
  struct Top {
    int at, tokens;
  };
  static int order_of(int tokens) { return std::countr_zero(std::bit_ceil(unsigned(tokens))); }

  std::set<int> free_[kOrders];  // where they begin
  std::vector<Top> tops_;
};

struct Held {
  size_t request;
  int at, asked, now;  // where; tokens reserved; tokens of KV
};

int asked_for(const std::string& reserves, const Lengths& one) {
  if (reserves == "max") return kMaxLen;
  const int power = one.prompt + int(std::bit_ceil(unsigned(one.output)));
  if (reserves == "pow2_whole") return power;
  if (reserves == "pow2") return std::min(kMaxLen, power);
  return one.prompt + one.output;
}

struct Sums {
  double steps = 0, batch = 0, useful = 0, reserved = 0, internal = 0;
};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* dataset : {"sharegpt", "alpaca"})
    for (const char* reserves : {"max", "pow2", "pow2_whole", "oracle", "blocks"})
      for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw)
        all.push_back({{"dataset", dataset}, {"reserves", reserves}, {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const int n = setting.tiny ? 400 : kRequests;
  const Result<LengthSet> lengths = request_lengths(point["dataset"], n, setting, int(point["sample"]));
  if (!lengths) return lengths.error();
  std::vector<Lengths> requests = lengths.value().requests;
  const std::string reserves = point["reserves"];
  const bool blocks = reserves == "blocks";
  Buddies pool(kPoolTokens);
  int free_blocks = kPoolTokens / kBlock, restarts = 0;
  const auto blocks_of = [](int tokens) { return (tokens + kBlock - 1) / kBlock; };
  std::deque<size_t> waiting;
  for (size_t i = 0; i < requests.size(); ++i) waiting.push_back(i);
  std::vector<Held> running;  // as they came
  Sums sums;
  size_t ended = 0;
  while (ended < requests.size()) {
    while (!waiting.empty()) {
      const Lengths& next = requests[waiting.front()];
      const int asked = asked_for(reserves, next);
      int at = 0;
      if (blocks) {
        if (blocks_of(next.prompt + 1) > free_blocks) break;
        free_blocks -= blocks_of(next.prompt);
      } else if ((at = pool.take(asked)) < 0) {
        break;
      }
      running.push_back({waiting.front(), at, asked, next.prompt - 1});
      waiting.pop_front();
    }
    if (running.empty()) return Finding{{}, "nobody fits into the empty pool"};
    // A token of each; with blocks those that came last make room where there is none.
    for (size_t i = 0; i < running.size(); ++i) {
      Held& one = running[i];
      const int first = requests[one.request].prompt;
      while (blocks && one.now >= first && one.now % kBlock == 0 && free_blocks == 0) {
        const Held last = running.back();
        Lengths& again = requests[last.request];  // what it has written is computed again, as a part of its prompt
        free_blocks += blocks_of(std::max(last.now, again.prompt));
        again = {last.now + 1, again.prompt + again.output - last.now - 1};
        waiting.push_front(last.request);
        running.pop_back();
        ++restarts;
        if (running.size() == i) break;
      }
      if (i == running.size()) break;
      if (blocks && one.now >= first && one.now % kBlock == 0) --free_blocks;
      ++one.now;
    }
    if (!waiting.empty()) {
      ++sums.steps;
      sums.batch += double(running.size());
      for (const Held& one : running) {
        const Lengths& whole = requests[one.request];
        const int end = whole.prompt + whole.output - 1;  // the last token's KV is never written
        const int held = blocks ? blocks_of(one.now) * kBlock : one.asked;
        sums.useful += one.now;
        sums.reserved += std::min(held, end) - one.now;
        sums.internal += std::max(0, held - end);
      }
    }
    std::erase_if(running, [&](const Held& one) {
      const Lengths& whole = requests[one.request];
      if (one.now < whole.prompt + whole.output - 1) return false;
      if (blocks)
        free_blocks += blocks_of(one.now);
      else
        pool.give_back(one.at, one.asked);
      ++ended;
      return true;
    });
  }
  if (blocks ? free_blocks != kPoolTokens / kBlock : pool.free_tokens() != kPoolTokens || pool.take(8192) != 0)
    return Finding{{}, "what was given back is not what was taken"};
  if (sums.steps == 0) return invalid("the pool was never full: nobody waited");
  const auto share = [&](double tokens) { return tokens / sums.steps / kPoolTokens; };
  return Finding{{{{"useful_share", share(sums.useful)},
                   {"reserved_share", share(sums.reserved)},
                   {"internal_share", share(sums.internal)},
                   {"external_share", 1 - share(sums.useful + sums.reserved + sums.internal)},
                   {"batch_mean", sums.batch / sums.steps},
                   {"restarts", restarts},
                   {"lengths", lengths.value().source}}},
                 ""};
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("orca_slots", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::orca_slots_experiment

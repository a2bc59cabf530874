#include "server/prefix_stats.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/options.h"
#include "server/commands.h"
#include "server/datasets.h"

namespace xpyd::server {
namespace {

int64_t common_units(const std::string& a, const std::string& b, int unit_bytes) {
  const size_t n = std::min(a.size(), b.size());
  return (std::mismatch(a.begin(), a.begin() + long(n), b.begin()).first - a.begin()) / unit_bytes;
}

// For each prompt, in the file's order, the most units that it has in common with one before it. In
// the sorted order that is one of its two nearest neighbours that stand before it in the file.
std::vector<int64_t> seen_before(const std::vector<size_t>& order, const std::vector<int64_t>& common) {
  const size_t n = order.size();
  std::vector<int64_t> best(n, 0);
  struct Entry {
    size_t prompt;
    int64_t shared;  // with the entry below it on the stack
  };
  for (bool forward : {true, false}) {
    std::vector<Entry> stack;
    for (size_t step = 0; step < n; ++step) {
      const size_t at = forward ? step : n - 1 - step;
      // common[i] is between the sorted prompts i - 1 and i.
      int64_t shared = step == 0 ? 0 : forward ? common[at] : common[at + 1];
      while (!stack.empty() && stack.back().prompt > order[at]) {
        shared = std::min(shared, stack.back().shared);
        stack.pop_back();
      }
      if (stack.empty()) shared = 0;
      best[order[at]] = std::max(best[order[at]], shared);
      stack.push_back({order[at], shared});
    }
  }
  return best;
}

}  // namespace

PrefixStats prefix_stats(const PrefixInput& input, int64_t min_count, int64_t min_length) {
  const size_t n = input.prompts.size();
  PrefixStats stats;
  stats.prompts = int64_t(n);
  if (n == 0) return stats;
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return input.prompts[a] < input.prompts[b]; });
  std::vector<int64_t> common(n + 1, 0);  // [i]: units shared by the sorted prompts i - 1 and i
  for (size_t i = 1; i < n; ++i)
    common[i] = common_units(input.prompts[order[i - 1]], input.prompts[order[i]], input.unit_bytes);

  // The inner nodes of the tree are the intervals of the sorted prompts with more in common than
  // their surroundings; they close from the deepest outwards.
  struct Node {
    int64_t depth;
    size_t first;
    bool has_kept_child;
  };
  std::vector<Node> open{{0, 0, false}};
  int64_t through = 0;
  for (size_t i = 1; i <= n; ++i) {
    size_t first = i - 1;
    bool kept = false;
    while (open.back().depth > common[i]) {
      const Node node = open.back();
      open.pop_back();
      const auto count = int64_t(i - node.first);
      if (count >= min_count && !node.has_kept_child) {
        const int64_t length = std::min(node.depth * input.unit_length, input.lengths[order[node.first]]);
        if (length > min_length) {
          ++stats.leaves;
          through += count;
          stats.most.push_back({count, length});
        }
      }
      kept = count >= min_count;
      first = node.first;
      if (open.back().depth >= common[i]) open.back().has_kept_child |= kept;
    }
    if (open.back().depth < common[i]) open.push_back({common[i], first, kept});
  }
  stats.r_leaf = double(stats.leaves) / double(n);
  stats.r_conv = double(through) / double(n);
  std::sort(stats.most.begin(), stats.most.end(),
            [](const auto& a, const auto& b) { return std::pair(a.count, a.length) > std::pair(b.count, b.length); });
  stats.most.resize(std::min<size_t>(stats.most.size(), 10));

  const std::vector<int64_t> seen = seen_before(order, common);
  double units = 0, length = 0;
  for (size_t p = 0; p < n; ++p) {
    stats.total_units += int64_t(input.prompts[p].size()) / input.unit_bytes;
    stats.total_length += input.lengths[p];
    units += double(seen[p]);
    length += double(std::min(seen[p] * input.unit_length, input.lengths[p]));
  }
  if (stats.total_units > 0) stats.unit_reuse = units / double(stats.total_units);
  if (stats.total_length > 0) stats.length_reuse = length / double(stats.total_length);
  return stats;
}

Result<PrefixInput> read_prefix_input(const std::string& path) try {
  FILE* file = std::fopen(path.c_str(), "rb");
  if (!file) return Error{ErrorCode::io, path + ": " + std::strerror(errno)};
  int c = std::getc(file);
  while (c == ' ' || c == '\n' || c == '\r' || c == '\t') c = std::getc(file);
  const bool failed = std::ferror(file);
  std::fclose(file);
  if (failed) return Error{ErrorCode::io, path + ": it cannot be read"};
  PrefixInput input;
  if (c == '[') {
    input.prompts = need(read_conversations(path));
    for (const std::string& text : input.prompts) input.lengths.push_back(int64_t(text.size()));
  } else if (c == '{') {
    const Load load = need(mooncake_load(path, std::numeric_limits<int>::max(), 1, 0));
    input.unit_bytes = sizeof(uint64_t);
    input.unit_length = kMooncakeBlockTokens;
    input.length_unit = "tokens";
    for (const BenchRequest& request : load.requests) {
      std::string& prompt = input.prompts.emplace_back();
      for (const TokenSpan& span : request.spans)  // one per hash id, and its seed stands for it
        prompt.append(reinterpret_cast<const char*>(&span.seed), sizeof span.seed);
      input.lengths.push_back(request.input_tokens);
    }
  } else {
    return invalid(path +
                   ": expected ShareGPT's JSON, which begins with '[', or a Mooncake trace, whose "
                   "lines begin with '{'");
  }
  if (input.prompts.empty()) return invalid(path + ": no prompts in it");
  return input;
} catch (const Error& error) {
  return error;
}

int prefix_stats_main(const Options& options) try {
  if (options.positional().empty()) throw invalid("expected FILE, a ShareGPT JSON file or a Mooncake trace");
  const std::string& path = options.positional()[0];
  need(check_result_file(options));
  const PrefixInput input = need(read_prefix_input(path));
  const int64_t min_count = options.integer("min-count"), min_length = options.integer("min-length");
  const PrefixStats s = prefix_stats(input, min_count, min_length);
  const char* unit = input.length_unit.c_str();
  const bool trace = input.unit_length > 1;
  std::printf("%s: %lld prompts, %lld %s\n", path.c_str(), (long long)s.prompts, (long long)s.total_length, unit);
  std::printf("maximal prefixes of more than %lld %s, shared by at least %lld prompts: %lld\n", (long long)min_length,
              unit, (long long)min_count, (long long)s.leaves);
  std::printf("  R_leaf, of the prompts             %.4f\n", s.r_leaf);
  std::printf("  R_conv, prompts through them       %.4f\n", s.r_conv);
  std::printf("reuse, unlimited cache, file's order\n");
  if (trace) std::printf("  of blocks of %d tokens            %.4f\n", kMooncakeBlockTokens, s.unit_reuse);
  std::printf("  of %s %*s %.4f\n", unit, int(30 - std::strlen(unit)), "", s.length_reuse);
  if (!s.most.empty()) std::printf("most shared: prompts x %s\n", unit);
  for (const SharedPrefix& p : s.most) std::printf("  %8lld x %lld\n", (long long)p.count, (long long)p.length);
  std::fflush(stdout);
  nlohmann::json out = {{"file", path},
                        {"prompts", s.prompts},
                        {"length_unit", unit},
                        {"total_length", s.total_length},
                        {"min_count", min_count},
                        {"min_length", min_length},
                        {"leaves", s.leaves},
                        {"r_leaf", s.r_leaf},
                        {"r_conv", s.r_conv},
                        {"unit_length", input.unit_length},
                        {"unit_reuse", s.unit_reuse},
                        {"length_reuse", s.length_reuse},
                        {"most_shared", nlohmann::json::array()}};
  for (const SharedPrefix& p : s.most) out["most_shared"].push_back({{"count", p.count}, {"length", p.length}});
  need(write_result_file(options, std::move(out)));
  return 0;
} catch (const Error& error) {
  return fail(": prefix-stats", error);
}

}  // namespace xpyd::server

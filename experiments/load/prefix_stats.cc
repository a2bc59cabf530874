#include "experiments/load/prefix_stats.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/json/json.h"
#include "base/options/options.h"
#include "base/siphash.h"
#include "experiments/load/records.h"
#include "experiments/simulate/traces.h"
#include "experiments/subcommands.h"
#include "model/folder.h"
#include "server/cli/commands.h"

namespace xpyd::server {
namespace {

using nlohmann::json;

int64_t common_units(const std::string& a, const std::string& b, int unit_bytes) {
  const size_t n = std::min(a.size(), b.size());
  return (std::mismatch(a.begin(), a.begin() + long(n), b.begin()).first - a.begin()) / unit_bytes;
}

// For each prompt, in the file's order, the most units that it shares with an earlier one. In sorted order that prompt
// is one of its two nearest neighbours that are earlier in the file.
std::vector<int64_t> seen_before(const std::vector<size_t>& order, const std::vector<int64_t>& common) {
  const size_t n = order.size();
  std::vector<int64_t> best(n, 0);
  struct Entry {
    size_t prompt;
    int64_t shared;  // with the entry below on the stack
  };
  for (bool forward : {true, false}) {
    std::vector<Entry> stack;
    for (size_t step = 0; step < n; ++step) {
      const size_t at = forward ? step : n - 1 - step;
      // common[i] belongs to the sorted prompts i - 1 and i.
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

PrefixStats prefix_stats(const PrefixInput& input, int64_t min_count, int64_t min_length, size_t most) {
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

  // The inner nodes of the tree are the intervals of sorted prompts that share more than their surroundings. The
  // deepest intervals close first.
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
          stats.most.push_back({count, length, order[node.first], size_t(node.depth)});
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
  stats.most.resize(std::min(stats.most.size(), most));

  stats.repeated = seen_before(order, common);
  const std::vector<int64_t>& seen = stats.repeated;
  double units = 0, length = 0;
  for (size_t p = 0; p < n; ++p) {
    stats.total_units += int64_t(input.prompts[p].size()) / input.unit_bytes;
    stats.total_length += input.lengths[p];
    units += double(seen[p]);
    length += double(std::min(seen[p] * input.unit_length, input.lengths[p]));
  }
  if (stats.total_units > 0) stats.unit_reuse = units / double(stats.total_units);
  if (stats.total_length > 0) stats.length_reuse = length / double(stats.total_length);
  if (const auto n_seen = n - size_t(std::ranges::count(seen, 0)); n_seen > 0)
    stats.mean_repeated = length / double(n_seen);
  return stats;
}

namespace {

// All turns of a record, joined by line ends.
std::string turns_of(const json& record, const std::string& where) {
  std::string text;
  const auto add = [&](const std::string& turn) { text += (text.empty() ? "" : "\n") + turn; };
  const bool sharegpt = find_field(record, "conversations");
  const char* list = sharegpt ? "conversations" : find_field(record, "conversation") ? "conversation" : nullptr;
  if (list)
    for (size_t i = 0; const json& turn : *need(get_array(record, list, where))) {
      const std::string at = where + ": " + list + "[" + std::to_string(i++) + "]";
      if (!turn.is_object()) throw invalid(at + ": expected an object");
      add(need(get_string(turn, sharegpt ? "value" : "content", at)));
    }
  else if (find_field(record, "prompt"))
    add(need(get_string(record, "prompt", where)));
  else
    for (const char* part : {"instruction", "context", "response"})
      if (const std::string turn = need(get_string(record, part, where)); !turn.empty()) add(turn);
  return text;
}

Result<PrefixInput> read_texts(const std::string& path, Result<bool> (RecordReader::*next)(std::string*)) try {
  PrefixInput input;
  RecordReader reader(path);
  for (std::string text; need((reader.*next)(&text));) {
    const json record = need(parse_json(text, reader.where(), {.max_bytes = RecordReader::kMaxBytes}));
    if (!record.is_object()) throw invalid(reader.where() + ": expected an object");
    text = turns_of(record, reader.where());
    if (text.empty()) continue;
    input.lengths.push_back(int64_t(text.size()));
    input.prompts.push_back(text);
  }
  input.text = [](std::string_view units) { return std::string(units); };
  return input;
} catch (const Error& error) {
  return error;
}

Result<PrefixInput> read_blocks(const std::string& path, const char* format) try {
  const Trace trace = need(find_trace_format(format)->load(path, {}));
  PrefixInput input;
  input.unit_bytes = sizeof(uint64_t);
  input.unit_length = trace.block_tokens;
  input.length_unit = "tokens";
  for (const TraceRequest& request : trace.requests) {
    input.prompts.emplace_back(reinterpret_cast<const char*>(request.blocks.data()),
                               request.blocks.size() * sizeof(uint64_t));
    input.lengths.push_back(request.prompt_tokens);
  }
  return input;
} catch (const Error& error) {
  return error;
}

// The format of a file of JSON lines, by its first line.
std::string format_of(const std::string& line, const std::string& where) {
  const json record = need(parse_json(line, where, {.max_bytes = RecordReader::kMaxBytes}));
  const auto has = [&](const char* name) { return record.is_object() && find_field(record, name); };
  if (has("hash_ids")) return has("chat_id") ? "bailian" : "mooncake";
  if (has("conversations") || has("conversation") || has("instruction") || has("prompt")) return "texts";
  throw invalid(where + ": expected conversations, conversation, instruction, prompt or hash_ids");
}

}  // namespace

Result<PrefixInput> read_prefix_input(const std::string& path) try {
  if (std::filesystem::is_directory(path)) return read_blocks(path, "weka");
  RecordReader reader(path);
  if (!reader.is_open()) return Error{ErrorCode::io, path + ": " + std::strerror(errno)};
  PrefixInput input;
  std::string line;
  if (reader.is_array()) {
    input = need(read_texts(path, &RecordReader::object));
  } else if (need(reader.line(&line)) && line[line.find_first_not_of(" \t")] == '{') {
    const std::string format = format_of(line, reader.where());
    input = need(format == "texts" ? read_texts(path, &RecordReader::line) : read_blocks(path, format.c_str()));
  } else {
    return invalid(path + ": expected a JSON array or JSON lines");
  }
  if (input.prompts.empty()) return invalid(path + ": the file has no prompts");
  return input;
} catch (const Error& error) {
  return error;
}

PrefixInput in_tokens(const PrefixInput& texts, const Tokenizer& tokenizer, int block_tokens) {
  PrefixInput input;
  input.unit_bytes = block_tokens > 1 ? sizeof(uint64_t) : sizeof(int32_t);
  input.unit_length = block_tokens;
  input.length_unit = "tokens";
  for (const std::string& text : texts.prompts) {
    const std::vector<int32_t> ids = tokenizer.encode(text, {.add_special_tokens = false});
    std::string& units = input.prompts.emplace_back();
    for (size_t at = 0; at < ids.size(); at += size_t(block_tokens)) {
      const size_t n = std::min(size_t(block_tokens), ids.size() - at);
      const std::string_view bytes(reinterpret_cast<const char*>(ids.data() + at), n * sizeof(int32_t));
      const uint64_t hash = block_tokens > 1 ? siphash({1, n}, bytes) : 0;
      units += block_tokens > 1 ? std::string_view(reinterpret_cast<const char*>(&hash), sizeof hash) : bytes;
    }
    input.lengths.push_back(int64_t(ids.size()));
  }
  if (block_tokens == 1)
    input.text = [&tokenizer](std::string_view units) {
      std::vector<int32_t> ids(units.size() / sizeof(int32_t));
      std::memcpy(ids.data(), units.data(), units.size());
      return tokenizer.decode(ids, false);
    };
  return input;
}

namespace {

// PrefixStats::mean_repeated in tokens, for texts that were compared by bytes.
double repeated_tokens(const PrefixInput& input, const PrefixStats& stats, const Tokenizer& tokenizer) {
  int64_t tokens = 0, n = 0;
  for (size_t i = 0; i < input.prompts.size(); ++i) {
    if (stats.repeated[i] == 0) continue;
    const std::string_view prefix = std::string_view(input.prompts[i]).substr(0, size_t(stats.repeated[i]));
    tokens += int64_t(tokenizer.encode(prefix, {.add_special_tokens = false}).size());
    ++n;
  }
  return n > 0 ? double(tokens) / double(n) : 0;
}

}  // namespace

int prefix_stats_main(const Options& options) try {
  if (options.positional().empty())
    throw invalid("expected FILE as an argument: texts, a trace, or a folder of WEKA's sessions");
  const std::string& path = options.positional()[0];
  need(check_result_file(options));
  PrefixInput input = need(read_prefix_input(path));
  std::unique_ptr<const Tokenizer> tokenizer;
  const std::string& by = options.text("unit");
  if (by != "file" && !input.text)
    throw invalid("--unit " + by + ": the blocks of a trace cannot be split otherwise; expected --unit file");
  if (input.text) {
    const std::string& dir = options.text("tokenizer");
    tokenizer = need(Tokenizer::load(dir.empty() ? kDemoModel : dir), "--tokenizer: ");
    if (by != "file") input = in_tokens(input, *tokenizer, by == "blocks" ? int(options.integer("block-tokens")) : 1);
  }
  const int64_t min_count = options.integer("min-count"), min_length = options.integer("min-length");
  const bool list = options.flag("list");
  const PrefixStats s = prefix_stats(input, min_count, min_length, list ? SIZE_MAX : 10);
  const char* unit = input.length_unit.c_str();
  const bool trace = input.unit_length > 1;
  std::printf("%s: %lld prompts, %lld %s\n", path.c_str(), (long long)s.prompts, (long long)s.total_length, unit);
  std::printf("maximal prefixes longer than %lld %s and shared by at least %lld prompts: %lld\n", (long long)min_length,
              unit, (long long)min_count, (long long)s.leaves);
  std::printf("  R_leaf, prefixes per prompt        %.4f\n", s.r_leaf);
  std::printf("  R_conv, prompts that have one      %.4f\n", s.r_conv);
  std::printf("reuse with an unlimited cache, in the file's order\n");
  if (trace) std::printf("  of blocks of %4d tokens           %.4f\n", input.unit_length, s.unit_reuse);
  std::printf("  of %s %*s %.4f\n", unit, int(30 - std::strlen(unit)), "", s.length_reuse);
  const bool in_bytes = input.length_unit == "bytes";
  const double mean_tokens = in_bytes ? repeated_tokens(input, s, *tokenizer) : s.mean_repeated;
  std::printf("  mean length of a repeated prefix   %.1f tokens\n", mean_tokens);
  if (!s.most.empty()) std::printf("most shared prefixes: prompts x %s\n", unit);
  const auto shown = [&input](const SharedPrefix& p) {
    return input.text ? json_text(input.text(
                            std::string_view(input.prompts[p.prompt]).substr(0, p.units * size_t(input.unit_bytes))))
                      : "prompt " + std::to_string(p.prompt);
  };
  for (const SharedPrefix& p : s.most)
    std::printf("  %8lld x %lld%s\n", (long long)p.count, (long long)p.length, list ? ("  " + shown(p)).c_str() : "");
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
                        {"mean_repeated_tokens", mean_tokens},
                        {"most_shared", nlohmann::json::array()}};
  for (const SharedPrefix& p : s.most) {
    out["most_shared"].push_back({{"count", p.count}, {"length", p.length}});
    if (list) out["most_shared"].back()["prefix"] = shown(p);
  }
  need(write_result_file(options, std::move(out)));
  return 0;
} catch (const Error& error) {
  return fail(": prefix-stats", error);
}

}  // namespace xpyd::server

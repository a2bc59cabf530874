#include "experiments/load/datasets.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/json/json.h"
#include "experiments/simulate/arrivals.h"
#include "experiments/simulate/records.h"
#include "experiments/simulate/traces.h"

namespace xpyd::server {
namespace {

using nlohmann::json;

constexpr int kMinTokens = 4, kMaxPromptTokens = 1024, kMaxBothTokens = 2048;  // ShareGPT's filter

int uniform_length(Random& random, int length, double ratio) {
  auto low = int64_t(std::floor(length * (1 - ratio)));
  auto high = int64_t(std::ceil(length * (1 + ratio)));
  return int(std::max<int64_t>(1, low + int64_t(random.below(uint64_t(high - low + 1)))));
}

Error no_file(const std::string& path) {
  return {ErrorCode::io, "--dataset-path: " + path + ": " + std::strerror(errno)};
}

// The first exchange of a row, or none if the row has too few turns or does not begin with a question. Throws an Error
// if the row is no conversation.
std::optional<Exchange> first_exchange(const std::string& text, const std::string& where) {
  const json row = need(parse_json(text, where, {.max_bytes = RecordReader::kMaxBytes}));
  if (!row.is_object()) throw invalid(where + ": expected an object");
  const json& turns = *need(get_array(row, "conversations", where));
  const auto value_of = [&](size_t i) {
    const std::string at = where + ": conversations[" + std::to_string(i) + "]";
    if (!turns[i].is_object()) throw invalid(at + ": expected an object");
    return need(get_string(turns[i], "value", at));
  };
  const auto is_from = [&](size_t i, std::initializer_list<std::string_view> names) {
    const json* from = turns[i].is_object() ? find_field(turns[i], "from") : nullptr;
    return from && from->is_string() && std::ranges::find(names, from->get<std::string>()) != names.end();
  };
  const size_t question = !turns.empty() && is_from(0, {"system"}) ? 1 : 0;
  if (turns.size() < question + 2) return {};
  Exchange exchange{value_of(question), value_of(question + 1)};
  if (question > 0) exchange.prompt = value_of(0) + "\n" + exchange.prompt;
  if (find_field(turns[question], "from") && !is_from(question, {"human", "user"})) return {};
  return exchange;
}

}  // namespace

std::vector<int32_t> prompt_tokens(const BenchRequest& request, int vocab) {
  std::vector<int32_t> ids;
  ids.reserve(size_t(request.input_tokens));
  for (const TokenSpan& span : request.spans) {
    Random random(span.seed);
    for (int i = 0; i < span.tokens; ++i) ids.push_back(int32_t(random.below(uint64_t(vocab))));
  }
  return ids;
}

Load random_load(int n, int input_tokens, int output_tokens, double range_ratio, uint64_t seed) {
  Load load;
  Random random(mix_seed(seed, 1));
  for (int i = 0; i < n; ++i) {
    BenchRequest request;
    request.input_tokens = uniform_length(random, input_tokens, range_ratio);
    request.output_tokens = uniform_length(random, output_tokens, range_ratio);
    request.spans = {{random.next(), request.input_tokens}};
    load.requests.push_back(std::move(request));
  }
  return load;
}

Load shared_prefix_load(int n, int groups, int prefix_tokens, int input_tokens, int output_tokens, uint64_t seed) {
  Load load;
  Random random(mix_seed(seed, 2));
  std::vector<uint64_t> group_seeds;
  for (int g = 0; g < groups; ++g) group_seeds.push_back(random.next());
  for (int i = 0; i < n; ++i) {
    BenchRequest request;
    request.input_tokens = prefix_tokens + input_tokens;
    request.output_tokens = output_tokens;
    request.spans = {{group_seeds[size_t(i % groups)], prefix_tokens}, {random.next(), input_tokens}};
    load.requests.push_back(std::move(request));
  }
  return load;
}

namespace {

// Seeded sentences of eight words, separated by " ".
std::string sentences(uint64_t seed, int words) {
  constexpr const char* kParts[8][6] = {{"The", "A", "Every", "One", "This", "Our"},
                                        {"quiet", "northern", "small", "careful", "old", "bright"},
                                        {"engineer", "river", "library", "teacher", "harbour", "clock"},
                                        {"keeps", "answers", "describes", "follows", "measures", "repeats"},
                                        {"nine", "several", "the", "two", "many", "no"},
                                        {"long", "simple", "open", "useful", "heavy", "green"},
                                        {"questions", "letters", "rules", "bridges", "stories", "boxes"},
                                        {"today.", "in order.", "by hand.", "at night.", "with care.", "again."}};
  Random random(seed);
  std::string text;
  for (int i = 0; i < words; ++i) {
    if (i > 0) text += ' ';
    text += kParts[i % 8][random.below(6)];
  }
  return text;
}

}  // namespace

Load readable_prefix_load(int n, int groups, int prefix_words, int question_words, int output_tokens, uint64_t seed) {
  Load load;
  Random random(mix_seed(seed, 5));
  std::vector<std::string> prompts;
  for (int g = 0; g < std::min(n, groups); ++g) prompts.push_back(sentences(random.next(), prefix_words));
  for (int i = 0; i < n; ++i) {
    BenchRequest request;
    request.text = prompts[size_t(i % groups)] + "\n\n" + sentences(random.next(), question_words);
    request.input_tokens = prefix_words + question_words;  // replaced by the server's count of tokens later
    request.output_tokens = output_tokens;
    load.requests.push_back(std::move(request));
  }
  return load;
}

Result<Load> mooncake_load(const std::string& path, int n, double time_scale, int max_model_len,
                           int hash_block_tokens) try {
  const disagg::Trace trace = need(
      disagg::find_trace_format("mooncake")
          ->load(path, {.limit = n, .speed = time_scale, .hash_block_tokens = hash_block_tokens}),
      "--dataset-path: ");
  Load load;
  load.timed = true;
  int64_t clipped_inputs = 0, clipped_outputs = 0;
  for (const disagg::TraceRequest& row : trace.requests) {
    BenchRequest& request = load.requests.emplace_back();
    request.arrival_s = row.arrival_s;
    request.after = row.after, request.think_s = row.think_s;
    load.sessions |= row.after >= 0;
    const int most = max_model_len > 0 ? max_model_len : INT_MAX;
    request.output_tokens = std::min(row.output_tokens, std::max(1, most / 2));
    request.input_tokens = std::min(row.prompt_tokens, std::max(1, most - request.output_tokens));
    clipped_outputs += request.output_tokens < row.output_tokens;
    clipped_inputs += request.input_tokens < row.prompt_tokens;
    for (int left = request.input_tokens; const uint64_t id : row.blocks) {
      if (left == 0) break;
      request.spans.push_back({mix_seed(id, 3), std::min(left, hash_block_tokens)});
      left -= request.spans.back().tokens;
    }
  }
  if (clipped_inputs + clipped_outputs > 0)
    load.notes.push_back("clipped to the server's max_model_len of " + std::to_string(max_model_len) + " tokens: " +
                         std::to_string(clipped_inputs) + " prompts and " + std::to_string(clipped_outputs) +
                         " outputs of " + std::to_string(load.requests.size()) + " requests");
  if (int(load.requests.size()) < n)
    load.notes.push_back(path + " holds " + std::to_string(load.requests.size()) + " requests");
  return load;
} catch (const Error& error) {
  return error;
}

Result<ShareGpt> read_sharegpt(const std::string& path) try {
  RecordReader reader(path);
  if (!reader.is_open()) return no_file(path);
  const auto next = reader.is_array() ? &RecordReader::value : &RecordReader::line;
  ShareGpt read;
  int64_t odd = 0;
  std::string first_odd;
  for (std::string text; need((reader.*next)(&text));) try {
      if (auto exchange = first_exchange(text, reader.where())) read.conversations.push_back(std::move(*exchange));
    } catch (const Error& error) {
      if (odd++ == 0) first_odd = error.message;
    }
  const std::string note = std::to_string(odd) + " rows are not conversations and are skipped; the first: " + first_odd;
  if (read.conversations.empty())
    return invalid(path + ": the file has no conversation" + (odd > 0 ? "; " + note : ""));
  if (odd > 0) read.notes.push_back(note);
  return read;
} catch (const Error& error) {
  return error;
}

Result<Load> sharegpt_load(std::vector<Exchange> conversations, int n, int output_tokens, int max_model_len,
                           uint64_t seed, const std::function<Result<int>(const std::string&)>& count_tokens) try {
  Random random(mix_seed(seed, 4));
  for (size_t i = conversations.size(); i > 1; --i) std::swap(conversations[i - 1], conversations[random.below(i)]);
  Load load;
  int64_t looked_at = 0, filtered = 0, too_long = 0;
  for (Exchange& conversation : conversations) {
    if (int(load.requests.size()) == n) break;
    ++looked_at;
    BenchRequest request;
    request.input_tokens = need(count_tokens(conversation.prompt));
    request.output_tokens = output_tokens > 0 ? output_tokens : need(count_tokens(conversation.reply));
    int both = request.input_tokens + request.output_tokens;
    bool too_short = request.input_tokens < kMinTokens || (output_tokens == 0 && request.output_tokens < kMinTokens);
    if (too_short || request.input_tokens > kMaxPromptTokens || both > kMaxBothTokens) {
      ++filtered;
    } else if (max_model_len > 0 && both > max_model_len) {
      ++too_long;
    } else {
      request.text = std::move(conversation.prompt);
      load.requests.push_back(std::move(request));
    }
  }
  load.notes.push_back(std::to_string(looked_at) + " conversations read: " + std::to_string(load.requests.size()) +
                       " used, " + std::to_string(filtered) + " outside 4..1024 prompt tokens and 2048 total tokens, " +
                       std::to_string(too_long) + " beyond the server's max_model_len");
  if (load.requests.empty()) return invalid("--dataset-path: no conversation fits: " + load.notes.back());
  return load;
} catch (const Error& error) {
  return error;
}

}  // namespace xpyd::server

#include "server/datasets.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/arrivals.h"
#include "base/json.h"
#include "base/records.h"

namespace xpyd::server {
namespace {

using nlohmann::json;

constexpr int kMaxLength = 1 << 24;                                            // of one prompt or answer
constexpr int kMinTokens = 4, kMaxPromptTokens = 1024, kMaxBothTokens = 2048;  // ShareGPT's filter

int uniform_length(Random& random, int length, double ratio) {
  auto low = int64_t(std::floor(length * (1 - ratio)));
  auto high = int64_t(std::ceil(length * (1 + ratio)));
  return int(std::max<int64_t>(1, low + int64_t(random.below(uint64_t(high - low + 1)))));
}

Error no_file(const std::string& path) {
  return {ErrorCode::io, "--dataset-path: " + path + ": " + std::strerror(errno)};
}

// visit(turns, value_of) for every conversation of a ShareGPT file; value_of(i) is the text of turn i. Throws Errors.
template <class Visit>
void for_each_conversation(const std::string& path, Visit visit) {
  RecordReader reader(path);
  if (!reader.is_open()) throw no_file(path);
  for (std::string text; need(reader.object(&text));) {
    const json object = need(parse_json(text, reader.where(), {.max_bytes = RecordReader::kMaxBytes}));
    const json& turns = *need(get_array(object, "conversations", reader.where()));
    visit(turns, [&](size_t i) {
      const std::string where = reader.where() + ": conversations[" + std::to_string(i) + "]";
      if (!turns[i].is_object()) throw invalid(where + ": expected an object");
      return need(get_string(turns[i], "value", where));
    });
  }
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

// Seeded sentences of eight words; " " between them.
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
    request.input_tokens = prefix_words + question_words;  // until the server says how many
    request.output_tokens = output_tokens;
    load.requests.push_back(std::move(request));
  }
  return load;
}

Result<BenchRequest> parse_mooncake_row(std::string_view line, const std::string& where) try {
  const json row = need(parse_json(line, where, {.max_bytes = RecordReader::kMaxBytes}));
  JsonFields fields(row, where);
  BenchRequest request;
  request.arrival_s = fields.number("timestamp", 0, 1e15) / 1000;
  request.input_tokens = int(fields.integer("input_length", 1, kMaxLength));
  request.output_tokens = int(fields.integer("output_length", 1, kMaxLength));
  const json& ids = *need(get_array(row, "hash_ids", where));
  int blocks = (request.input_tokens + kMooncakeBlockTokens - 1) / kMooncakeBlockTokens;
  if (ids.size() != size_t(blocks))
    return invalid(where + ": hash_ids: " + std::to_string(ids.size()) + " ids; an input_length of " +
                   std::to_string(request.input_tokens) + " needs " + std::to_string(blocks) + ", one per 512 tokens");
  int left = request.input_tokens;
  for (const json& id : ids) {
    if (!id.is_number_integer() || (!id.is_number_unsigned() && id.get<int64_t>() < 0))
      return invalid(where + ": hash_ids: expected whole numbers from 0");
    int tokens = std::min(left, kMooncakeBlockTokens);
    request.spans.push_back({mix_seed(id.get<uint64_t>(), 3), tokens});
    left -= tokens;
  }
  return request;
} catch (const Error& error) {
  return error;
}

Result<Load> mooncake_load(const std::string& path, int n, double time_scale, int max_model_len) try {
  RecordReader reader(path);
  if (!reader.is_open()) return no_file(path);
  Load load;
  load.timed = true;
  int64_t clipped_inputs = 0, clipped_outputs = 0;
  for (std::string line; int(load.requests.size()) < n && need(reader.line(&line));) {
    BenchRequest request = need(parse_mooncake_row(line, reader.where()));
    if (max_model_len > 0) {
      int output = std::min(request.output_tokens, std::max(1, max_model_len / 2));
      int input = std::min(request.input_tokens, std::max(1, max_model_len - output));
      clipped_outputs += output < request.output_tokens;
      clipped_inputs += input < request.input_tokens;
      request.output_tokens = output;
      request.input_tokens = input;
      int left = input;
      for (TokenSpan& span : request.spans) {
        span.tokens = std::min(span.tokens, left);
        left -= span.tokens;
      }
      std::erase_if(request.spans, [](const TokenSpan& span) { return span.tokens == 0; });
    }
    load.requests.push_back(std::move(request));
  }
  if (load.requests.empty()) return invalid(path + ": no requests in it");
  std::stable_sort(load.requests.begin(), load.requests.end(),
                   [](const auto& a, const auto& b) { return a.arrival_s < b.arrival_s; });
  double first_s = load.requests.front().arrival_s;
  for (BenchRequest& request : load.requests) request.arrival_s = (request.arrival_s - first_s) / time_scale;
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

Result<std::vector<Exchange>> read_sharegpt(const std::string& path) try {
  std::vector<Exchange> conversations;
  for_each_conversation(path, [&](const json& turns, const auto& value_of) {
    if (turns.size() < 2) return;
    Exchange exchange{value_of(0), value_of(1)};
    const json& first = turns[0];
    const bool from_human = !first.contains("from") || first["from"] == "human" || first["from"] == "user";
    if (from_human) conversations.push_back(std::move(exchange));
  });
  return conversations;
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
  load.notes.push_back(std::to_string(looked_at) + " conversations looked at: " + std::to_string(load.requests.size()) +
                       " used, " + std::to_string(filtered) + " outside 4..1024 prompt and 2048 total tokens, " +
                       std::to_string(too_long) + " beyond the server's max_model_len");
  if (load.requests.empty()) return invalid("--dataset-path: no conversation fits: " + load.notes.back());
  return load;
} catch (const Error& error) {
  return error;
}

}  // namespace xpyd::server

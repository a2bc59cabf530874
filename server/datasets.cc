#include "server/datasets.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "base/random.h"

namespace xpyd::server {
namespace {

using nlohmann::json;

constexpr int kMaxLength = 1 << 24;                                            // of one prompt or answer
constexpr size_t kMaxRowBytes = 16 << 20;                                      // of one line or conversation
constexpr int kMinTokens = 4, kMaxPromptTokens = 1024, kMaxBothTokens = 2048;  // ShareGPT's filter

uint64_t mix(uint64_t a, uint64_t b) { return Random(a * 0x9e3779b97f4a7c15u + b).next(); }

int uniform_length(Random& random, int length, double ratio) {
  auto low = int64_t(std::floor(length * (1 - ratio)));
  auto high = int64_t(std::ceil(length * (1 + ratio)));
  return int(std::max<int64_t>(1, low + int64_t(random.below(uint64_t(high - low + 1)))));
}

// Marsaglia & Tsang (2000) for shape >= 1; below 1 by Gamma(shape + 1) * U^(1 / shape). Our own,
// because the standard library's differs between implementations.
double gamma_sample(Random& random, double shape) {
  if (shape == 1) return random.exponential();
  if (shape < 1) {
    double u = 1 - random.uniform();
    return gamma_sample(random, shape + 1) * std::pow(u, 1 / shape);
  }
  double d = shape - 1.0 / 3, c = 1 / std::sqrt(9 * d);
  while (true) {
    double radius = std::sqrt(2 * random.exponential());
    double x = radius * std::cos(2 * M_PI * random.uniform());  // Box-Muller
    double v = 1 + c * x;
    if (v <= 0) continue;
    v = v * v * v;
    double u = 1 - random.uniform();
    if (std::log(u) < 0.5 * x * x + d - d * v + d * std::log(v)) return d * v;
  }
}

// Cuts a JSON array of objects into its objects, one at a time, so that a file of any size is read
// in the memory of one object and an error knows its line.
class JsonArrayReader {
 public:
  explicit JsonArrayReader(const std::string& path) : path_(path), file_(std::fopen(path.c_str(), "rb"), std::fclose) {}

  bool is_open() const { return bool(file_); }

  // "FILE:LINE" of the object read last.
  std::string where() const { return path_ + ":" + std::to_string(object_line_); }

  // False: the end of the array. The text is not yet checked to be JSON. What is wrong with the file is thrown.
  bool next(std::string* object) {
    object->clear();
    int c = skip_blanks();
    if (!begun_) {
      if (c != '[') throw error("expected '[', the beginning of an array of conversations");
      begun_ = true;
      c = skip_blanks();
      if (c == ']') return end();
    } else {
      if (c == ']') return end();
      if (c != ',') throw error("expected ',' or ']' after a conversation");
      c = skip_blanks();
    }
    object_line_ = line_;
    if (c != '{') throw error("expected '{', the beginning of a conversation");
    int depth = 0;
    bool in_string = false, escaped = false;
    while (true) {
      if (c == EOF) throw error("the file ends inside the conversation that begins here");
      object->push_back(char(c));
      if (object->size() > kMaxRowBytes) throw error("a conversation of more than 16 MiB");
      if (in_string) {
        if (escaped)
          escaped = false;
        else if (c == '\\')
          escaped = true;
        else if (c == '"')
          in_string = false;
      } else if (c == '"') {
        in_string = true;
      } else if (c == '{' || c == '[') {
        ++depth;
      } else if ((c == '}' || c == ']') && --depth == 0) {
        return true;
      }
      c = get();
    }
  }

 private:
  int get() {
    int c = std::getc(file_.get());
    if (c == '\n') ++line_;
    return c;
  }
  int skip_blanks() {
    int c = get();
    while (c == ' ' || c == '\n' || c == '\r' || c == '\t') c = get();
    object_line_ = line_;
    return c;
  }
  bool end() {
    if (skip_blanks() != EOF) throw error("text after the end of the array");
    return false;
  }
  Error error(const std::string& what) const { return invalid(where() + ": " + what); }

  std::string path_;
  std::unique_ptr<FILE, int (*)(FILE*)> file_;
  bool begun_ = false;
  int64_t line_ = 1, object_line_ = 1;
};

// One line without its end; longer ones are cut just beyond kMaxRowBytes, which parse_json then refuses.
bool next_line(FILE* file, std::string* line) {
  line->clear();
  int c = std::getc(file);
  if (c == EOF) return false;
  for (; c != EOF && c != '\n'; c = std::getc(file))
    if (line->size() <= kMaxRowBytes) line->push_back(char(c));
  return true;
}

Error no_file(const std::string& path) {
  return {ErrorCode::io, "--dataset-path: " + path + ": " + std::strerror(errno)};
}

// visit(turns, value_of) for every conversation of a ShareGPT file; value_of(i) is the text of turn i. Throws Errors.
template <class Visit>
void for_each_conversation(const std::string& path, Visit visit) {
  JsonArrayReader reader(path);
  if (!reader.is_open()) throw no_file(path);
  for (std::string text; reader.next(&text);) {
    const json object = need(parse_json(text, reader.where(), {.max_bytes = kMaxRowBytes}));
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
  Random random(mix(seed, 1));
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
  Random random(mix(seed, 2));
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

Result<BenchRequest> parse_mooncake_row(std::string_view line, const std::string& where) try {
  const json row = need(parse_json(line, where, {.max_bytes = kMaxRowBytes}));
  JsonFields fields(row, where);
  BenchRequest request;
  request.arrival_s = fields.number("timestamp", 0, 1e15) / 1000;
  request.input_tokens = int(fields.integer("input_length", 1, kMaxLength));
  request.output_tokens = int(fields.integer("output_length", 1, kMaxLength));
  need(fields.status());
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
    request.spans.push_back({mix(id.get<uint64_t>(), 3), tokens});
    left -= tokens;
  }
  return request;
} catch (const Error& error) {
  return error;
}

Result<Load> mooncake_load(const std::string& path, int n, double time_scale, int max_model_len) try {
  std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (!file) return no_file(path);
  Load load;
  load.timed = true;
  int64_t line_number = 0, clipped_inputs = 0, clipped_outputs = 0;
  std::string line;
  while (int(load.requests.size()) < n && next_line(file.get(), &line)) {
    std::string where = path + ":" + std::to_string(++line_number);
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    BenchRequest request = need(parse_mooncake_row(line, where));
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
  if (std::ferror(file.get())) return no_file(path);
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

Result<std::vector<std::string>> read_conversations(const std::string& path) try {
  std::vector<std::string> texts;
  for_each_conversation(path, [&](const json& turns, const auto& value_of) {
    std::string text;
    for (size_t i = 0; i < turns.size(); ++i) text += (i > 0 ? "\n" : "") + value_of(i);
    if (!text.empty()) texts.push_back(std::move(text));
  });
  return texts;
} catch (const Error& error) {
  return error;
}

Result<Load> sharegpt_load(std::vector<Exchange> conversations, int n, int output_tokens, int max_model_len,
                           uint64_t seed, const std::function<Result<int>(const std::string&)>& count_tokens) try {
  Random random(mix(seed, 4));
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

std::vector<double> arrival_times(int n, double rate, bool fixed, double burstiness, uint64_t seed) {
  std::vector<double> times(size_t(n), 0.0);
  if (std::isinf(rate)) return times;
  if (fixed) {
    for (int i = 0; i < n; ++i) times[size_t(i)] = i / rate;
    return times;
  }
  Random random(mix(seed, 5));
  double t = 0;
  for (double& time : times) time = t += gamma_sample(random, burstiness);
  for (double& time : times) time *= n / rate / t;
  return times;
}

}  // namespace xpyd::server

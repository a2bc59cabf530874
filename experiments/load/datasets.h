// Where the load of `xpyd bench` comes from: prompts, output lengths and, from a trace, arrival times.
//
// Prompts of made-up tokens are not stored: a prompt is a list of spans, each a run of ids that its seed alone decides,
// so that equal seeds are equal tokens and a trace of gigabytes of prompts stays small.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"

namespace xpyd::server {

struct TokenSpan {
  uint64_t seed;
  int tokens;
};

// One request of the load.
struct BenchRequest {
  std::vector<TokenSpan> spans;  // the prompt, when text is empty
  std::string text;              // the prompt as text (ShareGPT)
  int input_tokens = 0;
  int output_tokens = 0;  // max_tokens
  double arrival_s = 0;   // seconds after the first; from a trace, else 0
  // In a session: it is sent think_s after the answer of request `after`, which stands before it. -1: at arrival_s.
  int after = -1;
  double think_s = 0;
};

// Which load, and when its requests arrive: what the options say.
struct DatasetOptions {
  std::string name, path;  // of the data set; of its file
  int requests = 100;      // a file may hold fewer
  int input_tokens = 512, output_tokens = 128;
  double range_ratio = 0;
  int prefix_tokens = 256, prefix_groups = 8;
  double rate = 0;  // requests/s; infinite: all at once
  bool fixed_arrival = false;
  double burstiness = 1;
  double time_scale = 1;        // trace seconds per second of ours
  int hash_block_tokens = 512;  // mooncake: that an id stands for
  uint64_t seed = 0;
};

struct Load {
  std::vector<BenchRequest> requests;
  bool timed = false;              // arrival_s comes from the trace
  bool sessions = false;           // some requests wait for the answer of another
  std::vector<std::string> notes;  // what was dropped or clipped, in words
};

// Ids of the spans, each in [0, vocab).
std::vector<int32_t> prompt_tokens(const BenchRequest& request, int vocab);

// n requests with both lengths uniform in [floor((1 - r) L), ceil((1 + r) L)], at least 1 (vLLM's
// meaning of the range ratio).
Load random_load(int n, int input_tokens, int output_tokens, double range_ratio, uint64_t seed);

// n requests over `groups` groups in turn; request i begins with the prefix_tokens of group i %
// groups and goes on with input_tokens of its own.
Load shared_prefix_load(int n, int groups, int prefix_tokens, int input_tokens, int output_tokens, uint64_t seed);

// The same with prompts that can be read: seeded sentences, so many words of a system prompt that the questions of a
// group share, and so many of each question.
Load readable_prefix_load(int n, int groups, int prefix_words, int question_words, int output_tokens, uint64_t seed);

// Mooncake's JSON lines, as the simulator reads them (experiments/simulate/traces.h), sessions included: the first n
// rows, whose hash_ids stand for hash_block_tokens each. Arrival = (timestamp - the first row's) / time_scale; a
// session's delays stay. max_model_len > 0 clips: the output to half of it, then the prompt's end to what is left; a
// note counts them. Errors name the file and the line.
Result<Load> mooncake_load(const std::string& path, int n, double time_scale, int max_model_len,
                           int hash_block_tokens = 512);

// The first two turns (human, then gpt) of every conversation in a ShareGPT file, a JSON array or JSON lines. The text
// of a system turn before them begins the prompt.
struct Exchange {
  std::string prompt, reply;
};
struct ShareGpt {
  std::vector<Exchange> conversations;
  std::vector<std::string> notes;  // how many rows are no conversations, and why the first of them is none
};
// An error where no conversation is in it, or the array does not end.
Result<ShareGpt> read_sharegpt(const std::string& path);
// Conversations shuffled by seed, until n fit. Dropped: fewer than 4 tokens of prompt or reply,
// more than 1024 of prompt or 2048 of both, and what does not fit max_model_len (when > 0).
// count_tokens asks the server. output_tokens > 0 replaces the reply's length (and its minimum).
Result<Load> sharegpt_load(std::vector<Exchange> conversations, int n, int output_tokens, int max_model_len,
                           uint64_t seed, const std::function<Result<int>(const std::string&)>& count_tokens);

}  // namespace xpyd::server

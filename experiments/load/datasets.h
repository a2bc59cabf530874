// The load of `xpyd bench`: prompts, output lengths and, from a trace, arrival times.
//
// Prompts of made-up tokens are not stored. Such a prompt is a list of spans, and the seed of a span alone determines
// its ids. So equal seeds mean equal tokens, and a trace with gigabytes of prompts stays small.
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
  std::vector<TokenSpan> spans;  // the prompt if text is empty
  std::string text;              // the prompt as text
  int input_tokens = 0;
  int output_tokens = 0;  // max_tokens
  double arrival_s = 0;   // seconds after the first request, from a trace; else 0
  // In a session, the request is sent think_s after the answer to request `after`, which has a smaller index. -1: it is
  // sent at arrival_s.
  int after = -1;
  double think_s = 0;
};

// The options that select the load and its arrival times.
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
  int hash_block_tokens = 512;  // mooncake: tokens of each hash id
  uint64_t seed = 0;
};

struct Load {
  std::vector<BenchRequest> requests;
  bool timed = false;              // arrival_s comes from the trace
  bool sessions = false;           // some requests wait for the answer of another
  std::vector<std::string> notes;  // sentences on what was dropped or clipped
};

// The ids of all spans, each in [0, vocab).
std::vector<int32_t> prompt_tokens(const BenchRequest& request, int vocab);

// n requests with both lengths uniform in [floor((1 - r) L), ceil((1 + r) L)] and at least 1. The range ratio r has
// vLLM's meaning.
Load random_load(int n, int input_tokens, int output_tokens, double range_ratio, uint64_t seed);

// n requests over `groups` groups in turn. Request i begins with the prefix_tokens of group i % groups, and
// input_tokens of its own follow.
Load shared_prefix_load(int n, int groups, int prefix_tokens, int input_tokens, int output_tokens, uint64_t seed);

// The same with readable prompts of seeded sentences. A group shares a system prompt of prefix_words words, and each
// question has question_words words.
Load readable_prefix_load(int n, int groups, int prefix_words, int question_words, int output_tokens, uint64_t seed);

// Mooncake's JSON lines, sessions included, read by the simulator's reader (experiments/simulate/traces.h): the first n
// rows, whose hash_ids stand for hash_block_tokens tokens each. Arrival = (timestamp - the first row's) / time_scale;
// delays in a session are not scaled. max_model_len > 0 clips the output to half of it, then the end of the prompt to
// the rest; a note counts the clipped requests. Errors name the file and the line.
Result<Load> mooncake_load(const std::string& path, int n, double time_scale, int max_model_len,
                           int hash_block_tokens = 512);

// The first two turns (human, then gpt) of every conversation in a ShareGPT file, which is a JSON array or JSON lines.
// The text of a system turn before them becomes the beginning of the prompt.
struct Exchange {
  std::string prompt, reply;
};
struct ShareGpt {
  std::vector<Exchange> conversations;
  std::vector<std::string> notes;  // how many rows are no conversations, and what is wrong with the first of them
};
// Returns an error if the file contains no conversation or its array does not end.
Result<ShareGpt> read_sharegpt(const std::string& path);
// Shuffles the conversations by seed and takes them until n fit. Drops those with fewer than 4 tokens of prompt or
// reply, more than 1024 of prompt or 2048 of both, or more than max_model_len (if > 0). count_tokens asks the server.
// output_tokens > 0 replaces the reply's length and its minimum.
Result<Load> sharegpt_load(std::vector<Exchange> conversations, int n, int output_tokens, int max_model_len,
                           uint64_t seed, const std::function<Result<int>(const std::string&)>& count_tokens);

}  // namespace xpyd::server

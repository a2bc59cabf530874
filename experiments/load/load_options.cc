// The options of xpyd bench and xpyd prefix-stats.
#include "experiments/load/bench.h"
#include "experiments/load/datasets.h"
#include "experiments/subcommands.h"

namespace xpyd::server {

std::vector<OptionRow> bench_options() {
  using enum OptionKind;
  // name, kind, default, unit, choices, min, max, help, group, field, also
  return {
      {"url", text, "http://127.0.0.1:8000", "", "URL", 0, 0, "URL of the server", "bench", sets<&BenchOptions::url>},
      {"endpoint", text, "/v1/completions", "", "PATH", 0, 0,
       "path of a completions endpoint, or of a chat endpoint (…/chat/completions), which gets one message per request",
       "bench", sets<&SendOptions::endpoint>},
      {"model", text, "", "", "NAME", 0, 0, "model name in requests; empty: the server's first model", "bench",
       sets<&SendOptions::model>},
      {"api-key-file", text, "", "", "FILE", 0, 0, "file with the API key that is sent as a Bearer token", "bench",
       sets<&BenchOptions::api_key_file>},
      {"dataset", choice, "random", "", "random|shared-prefix|generated-shared-prefix|sharegpt|mooncake", 0, 0,
       "source of prompts and lengths; generated-shared-prefix: prompts of readable words, with as many words as "
       "shared-prefix has tokens",
       "bench", sets<&DatasetOptions::name>},
      {"dataset-path", text, "", "", "FILE", 0, 0,
       "file for --dataset sharegpt (a JSON array or JSON lines) or mooncake (JSON lines)", "bench",
       sets<&DatasetOptions::path>},
      {"requests", integer, "100", "requests", "", 1, 1 << 20,
       "number of requests to send; fewer if the file has fewer", "bench", sets<&DatasetOptions::requests>},
      {"rate", number, "inf", "requests/s", "", 1e-6, kInf,
       "arrival rate; inf: all at once; --dataset mooncake has its own times", "bench", sets<&DatasetOptions::rate>},
      {"arrival", choice, "poisson", "", "poisson|fixed", 0, 0, "distribution of the gaps between arrivals", "bench",
       sets_as<is<"fixed">, &DatasetOptions::fixed_arrival>},
      {"burstiness", number, "1", "", "", 1e-3, 1e3,
       "shape of the gamma distribution of the gaps; 1: Poisson; below 1: burstier", "bench",
       sets<&DatasetOptions::burstiness>},
      {"max-concurrency", integer, "0", "requests", "", 0, 65536,
       "maximum requests in flight; others wait at the client; 0: no limit", "bench",
       sets<&SendOptions::max_concurrency>},
      {"time-scale", number, "1", "", "", 1e-6, 1e6, "with --dataset mooncake: speed of the replay; 2: twice as fast",
       "bench", sets<&DatasetOptions::time_scale>},
      {"hash-block-tokens", integer, "512", "tokens", "", 1, kMaxTokens,
       "with --dataset mooncake: tokens that each entry of hash_ids stands for", "bench",
       sets<&DatasetOptions::hash_block_tokens>},
      {"input-len", integer, "512", "tokens", "", 1, kMaxTokens,
       "with --dataset random: prompt length; with shared-prefix: length of each request's own part", "bench",
       sets<&DatasetOptions::input_tokens>},
      {"output-len", integer, "128", "tokens", "", 1, kMaxTokens,
       "output length with --dataset random and shared-prefix; with sharegpt it replaces the file's lengths if given",
       "bench", sets<&DatasetOptions::output_tokens>},
      {"range-ratio", number, "0", "", "", 0, 0.999,
       "with --dataset random: lengths L are uniform in [(1-r)L, (1+r)L], as in vLLM", "bench",
       sets<&DatasetOptions::range_ratio>},
      {"prefix-len", integer, "256", "tokens", "", 1, kMaxTokens,
       "with --dataset shared-prefix: length of the part that a group shares", "bench",
       sets<&DatasetOptions::prefix_tokens>},
      {"prefix-groups", integer, "8", "groups", "", 1, 1 << 20,
       "with --dataset shared-prefix: number of groups, used in turn", "bench", sets<&DatasetOptions::prefix_groups>},
      {"vocab", integer, "0", "tokens", "", 0, kMaxTokens,
       "token ids of generated prompts are below this number; 0: ask the server", "bench", sets<&SendOptions::vocab>},
      {"temperature", number, "0", "", "", 0, 100, "sampling temperature; 0: greedy", "bench",
       sets<&SendOptions::temperature>},
      {"ignore-eos", choice, "on", "", "on|off", 0, 0,
       "on: the model's end token is ignored, so every answer has its full length", "bench",
       sets<&SendOptions::ignore_eos>},
      {"goodput", text, "", "ms", "'ttft:200 tbt:50 tpot:50 e2el:5000'", 0, 0,
       "a request counts as goodput if it meets all these limits; tbt is the mean of the longest tenth of its "
       "gaps",
       "bench", sets<&BenchOptions::goodput>},
      {"format", choice, "vllm", "", "sglang|vllm|json", 0, 0,
       "layout of the printed result: the table of vLLM's or SGLang's benchmark, or the same JSON as --json", "bench",
       sets<&BenchOptions::format>},
      {"warmups", integer, "1", "requests", "", 0, 1024, "requests that are sent and awaited first and not counted",
       "bench", sets<&BenchOptions::warmups>},
      {"timeout", number, "600", "s", "", 0.001, 86400, "time limit of one request, from its sending", "bench",
       sets<&SendOptions::timeout_s>},
      {"detailed", flag, "off", "", "", 0, 0, "write each request to --json too: lengths, times, gaps, text, error",
       "bench", sets<&SendOptions::keep_text>},
      {"progress", choice, "auto", "", "auto|off", 0, 0, "auto: show a progress bar if stderr is a terminal", "bench",
       sets_as<is<"auto">, &BenchOptions::progress>},
      {"seed", integer, "0", "", "", 0, kMaxSeed, "seed of every random number", "bench", sets<&DatasetOptions::seed>},
  };
}

std::vector<OptionRow> prefix_stats_options() {
  using enum OptionKind;
  return {
      {"min-count", integer, "2", "prompts", "", 2, kMaxTokens,
       "minimum number of prompts that share a prefix for it to count", "prefix-stats"},
      {"min-length", integer, "0", "tokens", "", 0, kMaxTokens,
       "a prefix counts if it is longer than this; in bytes if texts are compared by bytes", "prefix-stats"},
      {"unit", choice, "file", "", "file|tokens|blocks", 0, 0,
       "unit in which prompts are compared; file: bytes for texts, blocks for a trace", "prefix-stats"},
      {"block-tokens", integer, "16", "tokens", "", 2, 4096, "--unit blocks: tokens in one block", "prefix-stats"},
      {"tokenizer", text, "", "", "DIR", 0, 0, "model folder whose tokenizer counts tokens; empty: the demo model's",
       "prefix-stats"},
      {"list", flag, "off", "", "", 0, 0,
       "also print each such prefix: its text or, with blocks, the number of a prompt that starts with it",
       "prefix-stats"},
  };
}

}  // namespace xpyd::server

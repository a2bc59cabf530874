// The options of xpyd bench and xpyd prefix-stats.
#include "experiments/load/bench.h"
#include "experiments/load/datasets.h"
#include "experiments/subcommands.h"

namespace xpyd::server {

std::vector<OptionRow> bench_options() {
  using enum OptionKind;
  // name, kind, default, unit, choices, min, max, help, group, field, also
  return {
      {"url", text, "http://127.0.0.1:8000", "", "URL", 0, 0,
       "server, http or https, whose certificate is checked (SSL_CERT_FILE names other authorities than the system's)",
       "bench", sets<&BenchOptions::url>},
      {"endpoint", text, "/v1/completions", "", "PATH", 0, 0,
       "completions endpoint, or one of chats: …/chat/completions, each of one message", "bench",
       sets<&SendOptions::endpoint>},
      {"model", text, "", "", "NAME", 0, 0, "model to name in requests; empty: the server's first", "bench",
       sets<&SendOptions::model>},
      {"api-key", text, "", "secret", "KEY", 0, 0, "sent as a Bearer token", "bench", sets<&BenchOptions::api_key>},
      {"dataset", choice, "random", "", "random|shared-prefix|generated-shared-prefix|sharegpt|mooncake", 0, 0,
       "where prompts and lengths come from; generated-shared-prefix: of words that can be read, so many as there are "
       "tokens else",
       "bench", sets<&DatasetOptions::name>},
      {"dataset-path", text, "", "", "FILE", 0, 0, "of sharegpt (a JSON array or JSON lines) and mooncake (JSON lines)",
       "bench", sets<&DatasetOptions::path>},
      {"requests", integer, "100", "requests", "", 1, 1 << 20, "how many to send; a file may hold fewer", "bench",
       sets<&DatasetOptions::requests>, "num-prompts n"},
      {"rate", number, "inf", "requests/s", "", 1e-6, kInf,
       "arrivals; inf: all at once; the mooncake data set brings its own times", "bench", sets<&DatasetOptions::rate>},
      {"arrival", choice, "poisson", "", "poisson|fixed", 0, 0, "gaps between arrivals", "bench",
       sets_as<is<"fixed">, &DatasetOptions::fixed_arrival>},
      {"burstiness", number, "1", "", "", 1e-3, 1e3,
       "shape of the gamma distribution of gaps: 1 Poisson, below 1 burstier", "bench",
       sets<&DatasetOptions::burstiness>},
      {"max-concurrency", integer, "0", "requests", "", 0, 65536,
       "in flight at once, others wait at the client; 0: no limit", "bench", sets<&SendOptions::max_concurrency>},
      {"time-scale", number, "1", "", "", 1e-6, 1e6,
       "mooncake: trace seconds per second of ours; 2 replays twice as fast", "bench",
       sets<&DatasetOptions::time_scale>},
      {"hash-block-tokens", integer, "512", "tokens", "", 1, kMaxTokens, "mooncake: that each of hash_ids stands for",
       "bench", sets<&DatasetOptions::hash_block_tokens>},
      {"input-len", integer, "512", "tokens", "", 1, kMaxTokens,
       "random: prompt; shared-prefix: the part that is each request's own", "bench",
       sets<&DatasetOptions::input_tokens>},
      {"output-len", integer, "128", "tokens", "", 1, kMaxTokens, "random, shared-prefix; sharegpt when given", "bench",
       sets<&DatasetOptions::output_tokens>},
      {"range-ratio", number, "0", "", "", 0, 0.999, "random: lengths uniform in [(1-r)L, (1+r)L] (vLLM's meaning)",
       "bench", sets<&DatasetOptions::range_ratio>},
      {"prefix-len", integer, "256", "tokens", "", 1, kMaxTokens, "shared-prefix: the part that a group shares",
       "bench", sets<&DatasetOptions::prefix_tokens>},
      {"prefix-groups", integer, "8", "groups", "", 1, 1 << 20, "shared-prefix: groups, visited in turn", "bench",
       sets<&DatasetOptions::prefix_groups>},
      {"vocab", integer, "0", "tokens", "", 0, kMaxTokens, "ids of made-up prompts stay below it; 0: ask the server",
       "bench", sets<&SendOptions::vocab>},
      {"temperature", number, "0", "", "", 0, 100, "0: greedy", "bench", sets<&SendOptions::temperature>},
      {"ignore-eos", choice, "on", "", "on|off", 0, 0, "on: every answer has its full length", "bench",
       sets<&SendOptions::ignore_eos>},
      {"goodput", text, "", "ms", "'ttft:200 tbt:50 tpot:50 e2el:5000'", 0, 0,
       "limits that a good request meets, all of them; tbt: the mean of its longest tenth of gaps", "bench",
       sets<&BenchOptions::goodput>},
      {"format", choice, "vllm", "", "sglang|vllm|json", 0, 0, "whose table is printed; json: what --json writes",
       "bench", sets<&BenchOptions::format>},
      {"warmups", integer, "1", "requests", "", 0, 1024, "sent and awaited first, not counted", "bench",
       sets<&BenchOptions::warmups>},
      {"timeout", number, "600", "s", "", 0.001, 86400, "of one request, from its sending", "bench",
       sets<&SendOptions::timeout_s>},
      {"detailed", flag, "off", "", "", 0, 0, "each request in --json, too: lengths, times, gaps, text, error", "bench",
       sets<&SendOptions::keep_text>},
      {"progress", choice, "auto", "", "auto|off", 0, 0, "auto: a bar when stderr is a terminal", "bench",
       sets_as<is<"auto">, &BenchOptions::progress>},
      {"seed", integer, "0", "", "", 0, kMaxSeed, "of everything random", "bench", sets<&DatasetOptions::seed>},
  };
}

std::vector<OptionRow> prefix_stats_options() {
  using enum OptionKind;
  return {
      {"min-count", integer, "2", "prompts", "", 2, kMaxTokens, "a prefix counts when at least so many share it",
       "prefix-stats"},
      {"min-length", integer, "0", "tokens", "", 0, kMaxTokens,
       "and when it is longer than this; of texts by bytes: bytes", "prefix-stats"},
      {"unit", choice, "file", "", "file|tokens|blocks", 0, 0,
       "what texts are compared by; file: bytes of texts, the blocks of a trace", "prefix-stats"},
      {"block-tokens", integer, "16", "tokens", "", 2, 4096, "--unit blocks: of one", "prefix-stats"},
      {"tokenizer", text, "", "", "DIR", 0, 0, "the model folder whose tokens are counted; empty: the demo model's",
       "prefix-stats"},
      {"list", flag, "off", "", "", 0, 0,
       "all such prefixes, with what they are: of blocks, the number of a prompt that has it", "prefix-stats"},
  };
}

}  // namespace xpyd::server

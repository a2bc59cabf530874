// instructions: what a block table, and what a host tier, costs in instructions, which do not
// waver.
//
// Counted by valgrind's callgrind, which experiments/run.py puts around the program: one process a
// point. Points differ in `times`, how often the same is done; the difference of two is what one
// more costs, whatever the process does besides. One thread computes.
//
// `attention`: this machine's default kernel, 32 query heads, 8 KV heads of 128, bf16. decode: one
// sequence of 1,024 tokens; prefill: 256 tokens of one prompt. Arithmetic. Of a row and head, 256
// bytes of K and of V, some 60 instructions load, convert and multiply; a table adds a look-up and
// an address for a row or a run of rows, 1 to 10: blocks of 16 over contiguous 1.0 to 1.1 decoding,
// blocks of 1 up to 1.3; page groups are the same addresses: the same instructions, 1. In prefill a
// row serves many queries: 1 to 1.05. vAttention counts 7 to 13 % more instructions for the paged
// kernels of others (section 3.3.1: address arithmetic and branches).
//
// `tier`: a prompt of 256 tokens through llama-mini in f32, with a host tier that takes all its KV
// and without. Arithmetic. 50 MFLOP a token in 16 a fused instruction: 3 million and a third as
// many loads, 4 million a token. Its KV is 8 KiB: 256 copies of 32 bytes with their loads, 1,000
// instructions, and a 16th of what a block costs, 5 us or 10,000 instructions: 1,600 in 4 million,
// 1.0004. At most 1.005 with what the threads do to find each other.
#include "base/thread_team.h"
#include "experiments/attention_case.h"
#include "experiments/offload.h"
#include "server/options.h"

namespace xpyd::experiments {
namespace {

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (int times : {1, 3}) {
    for (const char* phase : {"decode", "prefill"})
      for (const char* memory :
           {"contiguous", "blocks of 1", "blocks of 16", "blocks of 256", "page groups"})
        all.push_back(
            {{"what", "attention"}, {"phase", phase}, {"memory", memory}, {"times", times}});
    for (const char* tier : {"no tier", "host tier"})
      all.push_back({{"what", "tier"}, {"phase", "prefill"}, {"memory", tier}, {"times", times}});
  }
  return all;
}

Result<Finding> attend(const Values& point, const Setting& setting) {
  const bool decode = point["phase"] == "decode";
  const std::string name = point["memory"];
  AttentionMemory memory{name};
  if (name.starts_with("blocks of ")) memory.block = std::stoi(name.substr(10));
  if (name == "page groups") memory.group = 65536;
  AttentionCase problem(decode ? AttentionShape{1, 1, setting.tiny ? 256 : 1024}
                               : AttentionShape{1, setting.tiny ? 64 : 256, 256},
                        memory, setting.seed);
  ThreadTeam team(1);
  for (int i = 0; i < int(point["times"]); ++i) default_attention().run(problem.args(), team);
  return Finding{{{{"variant", default_attention().name}}}, problem.check()};
}

Result<Finding> prompts(const Values& point, const Setting& setting) {
  std::vector<std::string> words = {offload_model(setting),
                                    "--device",
                                    "cpu",
                                    "--load-format",
                                    "dummy",
                                    "--topology",
                                    "1C",
                                    "--prefix-cache",
                                    "off",
                                    "--threads",
                                    "1",
                                    "--kv-bytes",
                                    setting.tiny ? "4MiB" : "32MiB",
                                    "--max-model-len",
                                    "512",
                                    "--max-batch",
                                    "2"};
  if (point["memory"] == "host tier") words.insert(words.end(), {"--host-kv-bytes", "32MiB"});
  Result<Options> options = Options::parse(option_table(), "serve", words, 1);
  if (!options) return options.error();
  if (Status status = check_options(options.value(), "serve"); !status) return status.error();
  auto stack = build_stack(options.value());
  if (!stack) return stack.error();
  (void)stack.value()->cluster->start();
  const int tokens = setting.tiny ? 32 : 256, n = point["times"];
  Finding found;
  for (int i = 0; i < n; ++i) {
    Run run = run_load(*stack.value(), {document(setting.seed, i, tokens, 1)}, {});
    if (!run.wrong.empty()) return Finding{{}, run.wrong};
  }
  found.rows.push_back({{"variant", default_attention().name}});
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) {
    return point["what"] == "tier" ? prompts(point, setting) : attend(point, setting);
  };
}

REGISTER_EXPERIMENT("instructions", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments

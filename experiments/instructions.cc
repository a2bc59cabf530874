// instructions: what a block table, and what a host tier, costs in instructions, which do not waver.
//
// Counted by valgrind's callgrind, which experiments/run.py puts around the program, one process a
// point, from when the program says so until it says stop: all threads, of which one computes.
//
// `attention`: this machine's default kernel, 32 query heads, 8 KV heads of 128, bf16. decode: one sequence of 1,024
// tokens; prefill: 256 tokens of one prompt. Arithmetic. Of a row and head, 256 bytes of K and of V, some 60
// instructions load, convert and multiply; a table adds a look-up and an address for a row or a run of rows, 1 to 10:
// blocks of 16 over contiguous 1.0 to 1.1 decoding, blocks of 1 up to 1.3; page groups are the same addresses: the same
// instructions, 1. In prefill a row serves many queries: 1 to 1.05. vAttention counts 7 to 13 % more instructions for
// the paged kernels of others (Fig. 2).
//
// `tier`: 256 tokens of llama-mini's KV in f32 are written, with a host tier that takes them and without. Arithmetic. 8
// KiB a token are 256 copies of 32 bytes, with their loads 600 to 1,000 instructions, and a 16th of what a block costs,
// 1 to 5 us or 2,000 to 10,000: 700 to 1,700, and what the threads do to find each other. The same token's products are
// 50 MFLOP, 16 in a fused instruction: 3.1 million at the least, so that the tier adds 0.02 to 0.06 %.
#include <chrono>
#include <thread>

#include "allocator/kv_pool.h"
#include "allocator/tiered.h"
#include "base/thread_team.h"
#include "experiments/attention_case.h"
#include "experiments/offload.h"

namespace xpyd::experiments::instructions_experiment {
namespace {

// valgrind's client request (its manual, section 3.1), by hand, as its header may not be there:
// code that does nothing, by which valgrind knows that it is asked. Nothing without valgrind.
void count_instructions(bool on) {
#ifdef __x86_64__
  uint64_t request[6] = {on ? 0x43540004u : 0x43540005u};  // callgrind: start, stop instrumentation
  uint64_t result = 0;
  asm volatile("rolq $3, %%rdi; rolq $13, %%rdi; rolq $61, %%rdi; rolq $51, %%rdi; xchgq %%rbx, %%rbx"
               : "=d"(result)
               : "a"(&request[0]), "0"(result)
               : "cc", "memory");
#else
  (void)on;
#endif
}

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const char* phase : {"decode", "prefill"})
    for (const char* memory : {"contiguous", "blocks of 1", "blocks of 16", "blocks of 256", "page groups"})
      all.push_back({{"what", "attention"}, {"phase", phase}, {"memory", memory}});
  for (const char* tier : {"no tier", "host tier"})
    all.push_back({{"what", "tier"}, {"phase", "prefill"}, {"memory", tier}});
  return all;
}

Result<Finding> attend(const Values& point, const Setting& setting) {
  const bool decode = point["phase"] == "decode";
  const std::string name = point["memory"];
  AttentionMemory memory{name};
  if (name.starts_with("blocks of ")) memory.block = std::stoi(name.substr(10));
  if (name == "page groups") memory.group = 65536;
  AttentionCase problem(
      decode ? AttentionShape{1, 1, setting.tiny ? 256 : 1024} : AttentionShape{1, setting.tiny ? 64 : 256, 256},
      memory, setting.seed);
  ThreadTeam team(1);
  default_attention().run(problem.args(), team);
  count_instructions(true);
  default_attention().run(problem.args(), team);
  count_instructions(false);
  return Finding{{{{"variant", default_attention().name}}}, problem.check()};
}

// The engine's thread tells the memory what is written, and the copying thread takes it away.
Result<Finding> write_out(const Values& point, const Setting& setting) {
  const int n = setting.tiny ? 32 : 256;
  const bool tier = point["memory"] == "host tier";
  const KvShape shape = kv_shape(load_model_config(offload_model(setting)).value(), Dtype::f32);
  KvOptions options{.shape = shape, .max_sequence_tokens = n + 1, .prefix_cache = false};
  options.pool_bytes = size_t(2 * n) * shape.token_bytes();
  options.tiers = {.host_bytes = size_t(2 * n) * shape.token_bytes()};
  Result<std::shared_ptr<KvPool>> pool = make_block_pool("paged", options);
  if (!pool) return pool.error();
  std::unique_ptr<KvMemory> memory = find_kv_scheme("paged")->make(pool.value(), options);
  if (tier) {
    Result<std::unique_ptr<KvMemory>> tiered = make_tiered(std::move(memory), options);
    if (!tiered) return tiered.error();
    memory = std::move(tiered).value();
  }
  const std::vector<int32_t> tokens(size_t(n) + 1, 1);
  Result<KvReservation> reserved = memory->reserve(tokens, 0);
  if (!reserved || !memory->append(reserved.value().handle, n)) return Finding{{}, "no room in the pool"};
  count_instructions(true);
  memory->written(reserved.value().handle, std::span(tokens).first(size_t(n)));
  while (memory->poll()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  count_instructions(false);
  const int64_t out = memory->stats().tiers.bytes_out;
  memory->free(reserved.value().handle);
  return Finding{{{{"variant", tier ? "out" : "none"}}},
                 out == (tier ? int64_t(size_t(n) * shape.token_bytes()) : 0) ? "" : "not all of the KV went out"};
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) {
    return point["what"] == "tier" ? write_out(point, setting) : attend(point, setting);
  };
}

REGISTER_EXPERIMENT("instructions", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::instructions_experiment

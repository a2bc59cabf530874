// `xpyd info` refused the vAttention paper's own example (Yi-34B: 60 layers, 8 KV heads of 128, a context of 200,000
// tokens, batch 500: 120 buffers of 100 GB): it counted twice the batch, and addresses in 2^32 rows of one head.
#include <cstring>
#include <fstream>

#include "allocator/kv_memory.h"
#include "allocator/kv_plan.h"
#include "allocator/kv_pool.h"
#include "base/json.h"
#include "server/commands.h"
#include "server/stack.h"
#include "tests/catch.h"
#include "tests/json.h"
#include "tests/server/quiet_stdout.h"

namespace xpyd::testing::vattention_addresses_test {
namespace {

json vattention_of(const std::vector<std::string>& more) {
  TempDir dir;
  std::ofstream(dir.path + "/config.json") <<
      R"({"model_type": "llama", "num_hidden_layers": 60, "hidden_size": 7168,
          "intermediate_size": 20480, "num_attention_heads": 56, "num_key_value_heads": 8,
          "vocab_size": 64000, "max_position_embeddings": 200000, "rms_norm_eps": 1e-5,
          "rope_theta": 5000000.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
          "tie_word_embeddings": false})";
  std::vector<std::string> words = {dir.path,     "--max-batch", "500",    "--kv-dtype",           "bf16",
                                    "--kv-bytes", "512MiB",      "--json", dir.path + "/info.json"};
  words.insert(words.end(), more.begin(), more.end());
  auto options = Options::parse(option_table(), "info", words, 1);
  INFO((options ? "" : options.error().message));
  REQUIRE(options);
  {
    QuietStdout quiet;
    REQUIRE(info_main(options.value()) == 0);
  }
  const json info = parsed(read_small_file(dir.path + "/info.json", 1 << 20).value());
  for (const json& pool : info["pools"])
    if (pool["scheme"] == "vattention") return pool;
  return {};
}

TEST_CASE("info refused the vAttention paper's Yi-34B example", "[info][vattention]") {
  const json one = vattention_of({});
  INFO(as_text(one));
  CHECK_FALSE(one.contains("error"));
  CHECK(one["addresses"]["buffers"] == 120);
  CHECK(one["addresses"]["token_bytes"] == 8 * 128 * 2);
  CHECK(one["addresses"]["buffer_bytes"] == 500.0 * 200000 * 2048);
  // The paper: two workers, 4 heads each, 100 GB a buffer, 12 TB a worker.
  const json two = vattention_of({"--prefill-tp", "2"});
  CHECK(two["addresses"]["buffers"] == 120);
  CHECK(two["addresses"]["buffer_bytes"] == 102.4e9);
  CHECK(two["addresses"]["bytes"] == 12.288e12);
  CHECK(two["addresses"]["ranks"] == 2);
  const json staged = vattention_of({"--prefill-pp", "7"});  // 9 layers on some stages, 8 on others
  CHECK(staged["addresses"]["buffers"] == 18);
}

TEST_CASE("a card's kernels refused the paper's Yi-34B example, whose layers they count one by one",
          "[info][vattention]") {
  KvOptions o;
  o.shape = {60, 8, 128, Dtype::bf16};
  o.max_sequence_tokens = 200000;
  o.vattention.max_sequences = 1000;
  o.pool_bytes = size_t(512) << 20;
  o.vattention.page_group_bytes = size_t(2) << 20;
  o.vattention.on_card = true;
  const auto plan = plan_pool("vattention", o);
  INFO((plan ? "" : plan.error().message));
  CHECK(plan);
  o.vattention.max_sequences = 2000;
  const auto more = plan_pool("vattention", o);
  REQUIRE(!more);
  CHECK(more.error().message.find(" rows of addresses of a layer, ") != std::string::npos);
}

TEST_CASE("vattention serves the paper's Yi-34B example: KV in the last of a thousand slots",
          "[allocator][vattention]") {
#if defined(__SANITIZE_THREAD__)
  SKIP_TEST("ThreadSanitizer leaves a program no 24 TB of addresses");
#endif
  KvOptions o;
  o.shape = {60, 4, 128, Dtype::bf16};
  o.max_sequence_tokens = 200000;
  o.vattention.max_sequences = 1000;  // twice the batch
  o.pool_bytes = size_t(64) << 20;
  o.vattention.share = KvShare::off;
  auto pool = make_block_pool("vattention", o);
  INFO((pool ? "" : pool.error().message));
  REQUIRE(pool);
  auto memory = find_kv_scheme("vattention")->make(std::move(pool).value(), o);
  CHECK(double(memory->layout().pool_bytes()) >= 24.5e12);
  // Slots of short sequences until one lies behind 2^32 rows of one head of the layers before it.
  const std::vector<int32_t> tokens(3, 7);
  std::vector<KvHandle> handles;
  for (int i = 0; i < 8; ++i) {
    auto reserved = memory->reserve(tokens, 0);
    REQUIRE(reserved);
    handles.push_back(reserved.value().handle);
    REQUIRE(memory->append(handles.back(), 3));
  }
  auto fill = [&](bool write) {
    for (size_t i = 0; i < handles.size(); ++i)
      for (int layer = 0; layer < 60; ++layer)
        for (int kv = 0; kv < 2; ++kv)
          for (int head = 0; head < 4; ++head) {
            std::byte* row = memory->view(handles[i]).row(layer, kv, 2, head);
            const int mark = int(((i * 60 + size_t(layer)) * 2 + size_t(kv)) * 4 + size_t(head));
            if (write) {
              std::memcpy(row, &mark, sizeof mark);
            } else {
              int there = 0;
              std::memcpy(&there, row, sizeof there);
              REQUIRE(there == mark);
            }
          }
  };
  fill(true);
  fill(false);
  const std::byte* last = memory->view(handles[7]).row(59, 1, 2, 3);
  CHECK(size_t(last - memory->base()) / o.shape.row_bytes() > size_t(1) << 32);
  for (KvHandle handle : handles) memory->free(handle);
  memory->check_invariants(true);
}

}  // namespace
}  // namespace xpyd::testing::vattention_addresses_test

// One engine over one KV memory, stepped by the measuring code. Several contestants over one model take turns step by
// step and see the same machine, so their times can be compared within a few percent.
//
// Background work of a memory (vAttention maps ahead) may fall into another contestant's turn. It takes microseconds
// beside milliseconds, and a server with a spare core has the same effect.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "batch/engine/engine.h"

namespace xpyd::experiments {

class Tally;

class Contestant {
 public:
  // `kv.pool_bytes` and the other options belong to this contestant alone.
  static Result<std::unique_ptr<Contestant>> create(const std::string& scheme, Model& model, const KvOptions& kv,
                                                    const EngineOptions& engine);

  // Submits a request with exactly max_tokens of output.
  void submit(std::vector<int32_t> prompt, int max_tokens);
  // The same, but copies the KV of all tokens except the prompt's last one from the first tokens of `source`, which
  // must have the same shape. Returns false if there is no room for it.
  [[nodiscard]] bool adopt(std::vector<int32_t> prompt, int max_tokens, const KvView& source);

  double step();  // runs one iteration and returns its seconds; requires that the engine is not idle

  // Puts the free blocks in random order, as in a pool that has served for a while. Requires: no request yet.
  void scramble(uint64_t seed);

  std::string name;                              // the scheme's name, unless changed
  SamplingParams sampling = {.temperature = 0};  // applies to requests submitted from now on
  Engine& engine() { return *engine_; }
  KvMemory& memory() { return *memory_; }
  size_t block_bytes() const { return block_bytes_; }
  // Number of ended requests, and the hash of their logits.
  int ended() const;
  uint64_t logits_hash() const;
  const std::vector<int32_t>& last_answer() const;  // requires that requests run one at a time
  std::string wrong() const;                        // "" if every ended request has all its tokens

 private:
  Contestant() = default;
  SequencePtr make(std::vector<int32_t> prompt, int max_tokens);

  size_t block_bytes_ = 0;
  RealClock clock_;
  std::shared_ptr<KvPool> pool_;
  std::unique_ptr<KvMemory> memory_;
  std::unique_ptr<Engine> engine_;
  std::shared_ptr<Tally> sink_;
  uint64_t next_id_ = 1;
};

// "" if all contestants ended the same requests with bit-identical logits.
std::string compare(const std::vector<std::unique_ptr<Contestant>>& contestants);

}  // namespace xpyd::experiments

// One engine over one KV memory, stepped by whoever measures. Several that take turns, step by
// step, over one model see the same machine, so that their times can be compared to a few percent.
//
// What a memory does in the background (vattention's mapping ahead) may then fall into another's
// turn: microseconds beside milliseconds, and a spared core has them in a server as well.
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
  // `kv.pool_bytes` and the rest are for this one alone.
  static Result<std::unique_ptr<Contestant>> create(const std::string& scheme, Model& model, const KvOptions& kv,
                                                    const EngineOptions& engine);

  // With exactly max_tokens of output.
  void submit(std::vector<int32_t> prompt, int max_tokens);
  // The same, and the KV of all but the prompt's last token is copied from the first tokens of
  // `source`, of the same shape. False: there is no room for it.
  [[nodiscard]] bool adopt(std::vector<int32_t> prompt, int max_tokens, const KvView& source);

  double step();  // seconds of one iteration; the engine must not be idle

  // Leaves free blocks in random order, as a pool that has served a while. Before any request.
  void scramble(uint64_t seed);

  std::string name;                              // the scheme's, unless it is changed
  SamplingParams sampling = {.temperature = 0};  // of those that are submitted from now on
  Engine& engine() { return *engine_; }
  KvMemory& memory() { return *memory_; }
  size_t block_bytes() const { return block_bytes_; }
  // Of all that have ended.
  int ended() const;
  uint64_t logits_hash() const;
  const std::vector<int32_t>& last_answer() const;  // of one request at a time
  std::string wrong() const;                        // "": every request that ended has all its tokens

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

// "": all have ended the same requests with the same logits, bit for bit.
std::string compare(const std::vector<std::unique_ptr<Contestant>>& contestants);

}  // namespace xpyd::experiments

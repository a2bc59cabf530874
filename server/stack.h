// The parts of a running xpyd, built from its options: what serve and generate have in common.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/options.h"
#include "disagg/cluster.h"
#include "model/chat_template.h"
#include "model/config.h"
#include "model/model.h"
#include "model/tokenizer.h"
#include "server/backend.h"

namespace xpyd::server {

struct Stack {
  RealClock clock;
  std::string model_dir;  // kDemoModel where none was given
  ModelConfig config;
  std::unique_ptr<const Tokenizer> tokenizer;         // null with --load-format dummy and no tokenizer.json
  std::unique_ptr<const ChatTemplate> chat_template;  // null: the model has none
  ClusterOptions options;                             // all that the model files and the command line say of it
  BackendOptions backend_options;
  int max_step_tokens() const { return std::max(options.step_tokens, options.max_batch); }  // of one instance
  std::unique_ptr<Backend> backend;     // null with --processes: the workers have theirs
  std::unique_ptr<Device> pool_device;  // with --processes, of the pool that they share; null: host
  std::unique_ptr<Runtime> runtime;     // not started
  Cluster* cluster = nullptr;           // the runtime, where its instances are threads
};

// MODEL_DIR, or the embedded demo model.
std::string model_dir(const Options& options);
Role role_of(const std::string& name);  // of --role
// What the command line says of the cluster and of the device, which has a say in its memory.
void read_options(const Options& options, ClusterOptions& cluster, BackendOptions& backend);

// The errors name the option or the file.
Result<std::unique_ptr<Stack>> build_stack(const Options& options);

// In parts: a worker has no runtime.
Result<std::unique_ptr<Stack>> prepare_stack(const Options& options);
Status open_backend(Stack& stack);
// Of all that instances must agree on, so that KV may cross between them.
uint64_t fingerprint(const Stack& stack);

}  // namespace xpyd::server

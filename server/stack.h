// The parts of a running xpyd, built from its options: what serve and generate have in common.
#pragma once

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

namespace xpyd {

struct Stack {
  RealClock clock;
  std::string model_dir;  // kDemoModel where none was given
  ModelConfig config;
  std::unique_ptr<const Tokenizer>
      tokenizer;  // null with --load-format dummy and no tokenizer.json
  const ChatTemplate* chat_template = nullptr;
  std::unique_ptr<Backend> backend;
  int max_model_len = 0;             // tokens
  std::unique_ptr<Cluster> cluster;  // not started
};

// MODEL_DIR, or the embedded demo model.
std::string model_dir(const Options& options);

// The error names the option or the file.
Result<std::unique_ptr<Stack>> build_stack(const Options& options);

}  // namespace xpyd

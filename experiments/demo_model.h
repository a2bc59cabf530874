// The demo model inside the binary, as experiments use it.
#pragma once

#include <memory>

#include "base/thread_team.h"
#include "model/folder.h"
#include "model/text/tokenizer.h"
#include "model/weights/weights.h"

namespace xpyd::experiments {

struct DemoModel {
  ModelConfig config;
  std::unique_ptr<const Tokenizer> tokenizer;
  ThreadTeam team{1};
  std::shared_ptr<const Weights> weights;

  // Loads the model. Later calls do nothing.
  Status load() {
    if (weights) return ok();
    auto read = load_model_config(kDemoModel);
    if (!read) return read.error();
    config = read.value();
    auto text = Tokenizer::load(kDemoModel);
    if (!text) return text.error();
    tokenizer = std::move(text).value();
    auto loaded = load_weights(kDemoModel, config, {}, team);
    if (!loaded) return loaded.error();
    weights = loaded.value();
    return ok();
  }
};

}  // namespace xpyd::experiments

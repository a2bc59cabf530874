// An instance of this process, asked directly.
#pragma once

#include "disagg/conductor.h"
#include "disagg/instance.h"

namespace xpyd::disagg {

class LocalProbe final : public InstanceProbe {
 public:
  explicit LocalProbe(const Instance& instance) : instance_(instance) {}
  InstanceStats stats() const override { return instance_.stats(); }
  KvStats kv() const override { return instance_.memory().stats(); }
  std::optional<int> promise(std::span<const int32_t> tokens, uint64_t salt) const override {
    return instance_.memory().promise(tokens, salt);
  }

 private:
  const Instance& instance_;
};

}  // namespace xpyd::disagg

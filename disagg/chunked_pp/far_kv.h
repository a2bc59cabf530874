// KV of stages on other hosts, as the head's KvMemory and Sender see it: copies of blocks, and posts, go to the stage
// that has the bytes. Between hosts the wire is tcp, whose addresses are the same for every poster.
//
// Thread safety: the instance's thread; heard() is called by the channels'.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "base/device/device.h"
#include "disagg/chunked_pp/remote_pipeline.h"

namespace xpyd::disagg::ranks {

// Copies are done when what comes after them is: in the order of each stage's channel.
class FarQueue final : public DeviceQueue {
 public:
  explicit FarQueue(RemotePipeline& pipeline) : pipeline_(pipeline) {}
  void copy(std::span<const Copy> copies, bool read_soon) override;
  int64_t mark() override { return 0; }
  bool reached(int64_t) override { return true; }
  void wait() override {}

 private:
  RemotePipeline& pipeline_;
};

// `inner`: meets the peers for the instance, and reads nothing. A post must be of one stage's rows.
std::unique_ptr<KvTransport> make_far_wire(std::unique_ptr<KvTransport> inner, RemotePipeline& pipeline, Clock& clock);

}  // namespace xpyd::disagg::ranks

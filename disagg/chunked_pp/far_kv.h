// KV of stages on other hosts. The head's KvMemory and Sender see it as they see any other: copies of blocks, and
// posts, go to the stage that has the bytes, whose own endpoint posts them, whatever the stage computes meanwhile.
// Between hosts the wire is tcp, whose addresses are the same for every poster.
//
// Thread safety: FarQueue and the head's wire: the instance's thread. KvPoster: the channel's.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/device/device.h"
#include "disagg/chunked_pp/remote_pipeline.h"

namespace xpyd::disagg::ranks {

// A copy is done before the waves that begin after it. A post may overtake it, so an instance with stages elsewhere
// must not post rows that it has just copied. None does: radix trees, vattention and tiers, which copy rows of prompts
// that leave, are refused there.
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
std::unique_ptr<KvTransport> make_far_transport(std::unique_ptr<KvTransport> inner, RemotePipeline& pipeline,
                                                const TransportOptions& options);

// Whether these bytes are in the stage's KV: they come from another process.
bool inside(const KvBytes& piece, std::span<const MemoryRange> kv);

// The stage's half.
class KvPoster {
 public:
  KvPoster(std::unique_ptr<KvTransport> transport, std::vector<MemoryRange> kv, ChannelPtr head)
      : transport_(std::move(transport)), kv_(std::move(kv)), head_(std::move(head)) {}
  // ConnectPeer, Leave, Transfer, Cancel. Error: it is none of these, or of other bytes than the stage's.
  Status take(uint16_t type, std::string_view bytes);
  // Tells the head what has come of them. True: something is under way.
  bool go_on();

 private:
  void post(const Transfer& post);

  const std::unique_ptr<KvTransport> transport_;
  const std::vector<MemoryRange> kv_;  // [tp]
  const ChannelPtr head_;
  std::map<PeerId, std::string> connecting_;  // their addresses
  std::map<uint64_t, TransferId> posts_;      // by the head's id
  TransferPlan plan_;                         // of the post that is told in several messages
};

}  // namespace xpyd::disagg::ranks

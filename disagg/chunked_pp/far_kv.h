// KV of stages on other hosts. The head's KvMemory and Sender use it like local KV. The head sends block copies and
// transfers to the stage that has the bytes, and the stage's own transport posts them while the stage computes. Between
// hosts the transport is tcp, because a tcp address serves every initiator.
//
// Thread safety: FarQueue and the head's transport: the instance's thread. KvPoster: the I/O thread of the channel.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/device/device.h"
#include "disagg/chunked_pp/remote_pipeline.h"

namespace xpyd::disagg::ranks {

// Sends block copies to the stages. A copy is complete before the waves that begin after it. A transfer may overtake
// it, so an instance with remote stages must not transfer rows that it has just copied. None does: radix trees,
// vattention and offload tiers copy rows of prompts that leave, and are refused there.
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

// Makes the head's transport, whose transfers the stages post. `inner` gives the address and connects to peers, and
// moves no bytes. Requires: all rows of a transfer are of one stage. open() fails, because the head's process has no KV
// that a peer could read or write.
std::unique_ptr<KvTransport> make_far_transport(std::unique_ptr<KvTransport> inner, RemotePipeline& pipeline,
                                                const TransportOptions& options);

// The stage's half: it connects to peers and posts transfers as the head tells it.
class KvPoster {
 public:
  KvPoster(std::unique_ptr<KvTransport> transport, std::vector<MemoryRange> kv, ChannelPtr head)
      : transport_(std::move(transport)), kv_(std::move(kv)), head_(std::move(head)) {}
  // Handles a ConnectPeer, Leave, Transfer or Cancel. Error: the message is invalid.
  Status take(uint16_t type, std::string_view bytes);
  // Sends the head the Outcome of each ConnectPeer and Transfer that has ended. Returns true while others have not.
  bool go_on();

 private:
  void post(const Transfer& post);

  const std::unique_ptr<KvTransport> transport_;
  const std::vector<MemoryRange> kv_;  // [tp]
  const ChannelPtr head_;
  std::map<PeerId, std::string> connecting_;  // addresses of peers that are being connected
  std::map<uint64_t, TransferId> posts_;      // by the head's id
  TransferPlan plan_;                         // of a Transfer that arrives in several messages
};

}  // namespace xpyd::disagg::ranks

// The rdma transport and the initiator's half of it: transfers, and the queue pairs that access peers' memory. The
// owner's half is rdma_serving.h. A link carries one side's transfers, on one queue pair for each NIC port (`NicPort`).
//
// The copies of a transfer become RDMA requests; copies that are adjacent on the remote side share one. Requests go out
// in batches with one completion each. A queue pair takes batches up to a limit of bytes and requests, and the rest
// waits for poll(). The last request of a write carries the registration's generation as immediate data, so that the
// owner counts the arrival. A read is followed by an empty write behind a fence that does this. On several NIC ports
// each batch of a large transfer takes the queue pair with the fewest bytes in flight, and the last request waits for
// the others' completions.
//
// Requests in flight cannot be cancelled. To end them the link destroys its queue pairs: no byte moves afterwards, and
// every transfer of the link has failed. The instance connects again (KvTransport::connect()).
//
// Thread safety: the instance's thread calls everything. The bootstrap's I/O thread writes `Link::left`.
#pragma once

#include <atomic>
#include <deque>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "disagg/transport/posting_transport.h"
#include "disagg/transport/rdma/rdma_serving.h"
#include "disagg/transport/rdma/rdma_verbs.h"

namespace xpyd::disagg::rdma {

// One RDMA request: remote bytes in one range of the registration, and the local pieces that they are gathered from or
// scattered to, in order.
struct Request {
  uint64_t remote;
  uint32_t range;  // index into RemoteKey::ranges
  uint32_t first_piece, n_pieces;
  uint32_t bytes;
};
struct LocalPiece {
  uint64_t address;
  uint32_t bytes, region;
};
struct Requests {
  std::vector<Request> list;
  std::vector<LocalPiece> pieces;
  size_t bytes = 0;
};
struct RequestLimits {  // of one request
  size_t bytes;
  uint32_t pieces;
};

// Sets `planned` to the requests of these copies. Copies that are adjacent on the remote side share a request.
// Requires: the local sides lie within `regions`. Returns false if a remote side is outside `ranges`, which are sorted
// and disjoint.
bool plan_requests(std::span<const Copy> copies, KvOp op, std::span<const AddressRange> ranges,
                   std::span<const MemoryRange> regions, const RequestLimits& limits, Requests& planned);

constexpr size_t kBatchBytes = 1 << 20;
constexpr int kBatchRequests = 64;

// Requests [next, next + n) of a transfer are posted together, with one completion.
struct BatchSize {
  int n = 0;
  bool last = false;    // the batch ends the transfer
  bool notice = false;  // an empty write follows, which the owner counts; it takes one more place in the queue
};
// Returns the size of the next batch. `room`: free places in the queue pair. `alone`: no request of this transfer is in
// flight on other NIC ports, so the request that the owner counts may go out.
BatchSize next_batch(const Requests& planned, KvOp op, size_t next, int room, bool alone);

struct Link;
struct Transfer {
  std::shared_ptr<Link> link;
  KvTransfer what;
  int64_t mark = 0;  // device memory: the source rows are complete when the device queue has reached this mark
  Requests requests;
  size_t next = 0;     // first request that is not posted
  int nic_port = -1;   // of the last batch
  int batches = 0;     // in flight
  bool sent = false;   // its last request is posted
  double until_s = 0;  // if unwanted: Clock time until which its requests in flight may complete
  TransferState state = TransferState::in_flight;
};
struct Batch {
  Transfer* transfer;
  uint32_t requests;
  size_t bytes;
};
struct QueuePair {  // a link's queue pair on one NIC port
  Queue queue;
  std::deque<Batch> batches;  // in flight, as are the next two
  uint32_t requests = 0;
  size_t bytes = 0;
};
using Flag = std::shared_ptr<std::atomic<bool>>;
struct Link {
  std::string address;
  std::vector<AddressRange> regions;
  ChannelPtr channel;                  // held()
  Flag left;                           // the channel has ended
  std::vector<QueuePair> queue_pairs;  // none: the link has ended
  std::deque<Transfer*> waiting;       // transfers that still have requests to post
  bool dead() const { return queue_pairs.empty() || *left; }
};
struct Connected {     // the answer of a peer to a call
  ChannelPtr channel;  // held()
  Flag left;
  std::vector<Queue> queues;
  Offer offer;
};

class RdmaTransport final : public PostingTransport<Link, Transfer, Serving> {
 public:
  RdmaTransport(const TransportOptions& options, std::vector<NicPort> nic_ports);
  ~RdmaTransport() override;
  Status start();
  std::string address() const override { return bootstrap_.address(); }

 private:
  Result<std::shared_ptr<Link>> connect_peer(PeerId peer, const std::string& address) override;
  void leave(PeerId peer, const std::shared_ptr<Link>& link) override;
  std::shared_ptr<Transfer> begin(TransferId id, const std::shared_ptr<Link>& link, const KvTransfer& what,
                                  const TransferPlan& plan) override;
  TransferState progress(Transfer& t, bool unwanted) override;
  Serving& registrations() const override { return serving_; }

  Status call(const std::string& address, const std::shared_ptr<Answer<Connected>>& answer);
  void pump(Link& link);
  bool advance(Link& link, Transfer& t);  // false: some of its requests must wait
  bool send_batch(Link& link, Transfer& t, const BatchSize& size);
  void poll_completions(Link& link);
  void end(Link& link);

  std::vector<NicPort> nic_ports_;
  mutable Serving serving_;
  Bootstrap bootstrap_;
  Clock& clock_;
  DeviceQueue* const device_queue_;  // if the KV lies in device memory: the queue whose work writes it; else null
  Calls<Connected> calls_;
  uint32_t most_pieces_ = UINT32_MAX;         // of one request, on every NIC port
  ibv_send_wr requests_[kBatchRequests + 1];  // buffer for the next batch, as is pieces_
  std::vector<ibv_sge> pieces_;
};

}  // namespace xpyd::disagg::rdma

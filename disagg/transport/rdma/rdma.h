// The rdma transport and the initiator's half of it: transfers, and the queue pairs that access peers' memory. The
// owner's half is rdma_serving.h. A link carries one side's transfers, on one queue pair for each NIC port (`NicPort`).
//
// The copies of a transfer become RDMA requests; copies that are adjacent on the remote side share one. Requests go out
// in batches with one completion each. A queue pair takes batches up to a limit of bytes and requests, and the rest
// waits for poll(). The last request of a write carries the registration's generation as immediate data, so that the
// owner counts the arrival. A read is followed by an empty write behind a fence that does this. On several NIC ports
// each batch of a large transfer takes the queue pair with the fewest bytes in flight. The last request waits for the
// completions of the transfer on the other ports.
//
// Requests in flight cannot be cancelled. To end them the link destroys its queue pairs: no byte moves afterwards, and
// every transfer with requests in flight on the link has failed. The link is then renewed over its channel, and later
// transfers wait for it.
//
// Thread safety: the instance's thread calls everything. The bootstrap's I/O thread writes `Inbox`.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "disagg/transport/posting_transport.h"
#include "disagg/transport/rdma/rdma_plan.h"
#include "disagg/transport/rdma/rdma_serving.h"
#include "disagg/transport/rdma/rdma_verbs.h"

namespace xpyd::disagg::rdma {

using KeysOfRegistration = std::shared_ptr<const RegistrationKeys>;
// Messages of the owner's side: remote keys and the answers to sync and renew. Thread safety: any thread.
struct Inbox {
  std::mutex mutex;
  std::unordered_map<uint32_t, KeysOfRegistration> keys;  // by index of the registration
  std::optional<std::vector<NicPortEnd>> renewed;
  std::atomic<bool> left = false;
  std::atomic<bool> news = false;  // `renewed` or `left` was set and has not been read
  std::atomic<uint64_t> synced = 0;
  bool take(const Message& message);  // false: an owner does not send this
};
struct Link;
struct Transfer {
  std::shared_ptr<Link> link;
  KvTransfer what;
  double until_s = 0;  // if cancelled: Clock time until which requests in flight may complete; 0: not cancelled
  std::vector<Copy> copies;
  int64_t mark = 0;  // device memory: the source rows are complete when the device queue has reached this mark
  // seeking: waits for keys; sent: its last request is posted; stopped: given up, and requests are in flight; refused:
  // waits until the owner has counted it.
  enum { seeking, moving, sent, stopped, refused, done, failed } stage = seeking;
  uint64_t sync = 0;  // seeking, refused: number of the question to the owner; 0: not asked yet
  KeysOfRegistration keys;
  bool planned = false;
  Requests requests;
  size_t next = 0;           // first request that is not posted
  int nic_port = -1;         // NIC port of a transfer that is not striped
  std::vector<int> batches;  // in flight, by NIC port
  int n_batches = 0;
  bool settled() const { return stage == done || stage == failed; }
};
struct Batch {
  Transfer* transfer;
  int requests;
  size_t bytes;
};
struct QueuePair {  // a link's queue pair on one NIC port
  Queue queue;
  uint32_t serial = 0;  // unique number of this queue pair, in ids of its completions
  std::deque<Batch> batches;
  int requests = 0;  // in flight
  size_t bytes = 0;
};
struct Link {
  std::string address;
  std::vector<AddressRange> regions;
  ChannelPtr channel;  // held()
  std::shared_ptr<Inbox> inbox;
  std::vector<QueuePair> queue_pairs;
  enum { ready, renewing, lost } state = ready;
  std::deque<Transfer*> waiting;  // transfers that still have requests to post or wait for an answer
  uint64_t last_sync = 0;
  bool dead() const { return state == lost || inbox->left; }
};
struct Connected {     // the answer of a peer to a call
  ChannelPtr channel;  // held()
  std::shared_ptr<Inbox> inbox;
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

  // Calls and transfers.
  ChannelEvents accepted(const ChannelPtr& channel, PeerId peer);  // on the bootstrap's I/O thread
  Status call(const std::string& address, const std::shared_ptr<Answer<Connected>>& answer);
  Result<std::shared_ptr<Link>> answered(const std::string& address, Connected& met);
  void pump(Link& link);
  void seek(Link& link, Transfer& t);
  void refuse(Link& link, Transfer& t);
  void settle(Transfer& t, bool good);
  // Queue pairs: posting, completions, errors, renewal.
  bool advance(Link& link, Transfer& t);  // false: the queues are full
  bool send_batch(Link& link, Transfer& t, size_t nic_port);
  void poll_completions();
  void completed(size_t nic_port, const ibv_wc& wc);
  void number_lines(Link& link, std::vector<Queue>& queues);
  std::vector<Transfer*> drop_queues(Link& link);  // returns the transfers that had requests in flight
  void renew(Link& link, Transfer* culprit, bool refused);
  void read_mail(Link& link);
  void die(Link& link);

  std::vector<NicPort> nic_ports_;
  mutable Serving serving_;
  Bootstrap bootstrap_;
  const RequestLimits limits_;
  Clock& clock_;
  DeviceQueue* const device_queue_;  // if the KV lies in device memory: the queue whose work writes it; else null
  Calls<Connected> calls_;
  struct Place {
    Link* link;
    size_t nic_port;
  };
  std::unordered_map<uint32_t, Place> places_;  // of queue pairs, by serial
  std::vector<int> nic_port_requests_;          // in flight, by NIC port
  uint32_t last_serial_ = 0;
  std::vector<ibv_send_wr> requests_;  // buffer for the next batch, as is pieces_
  std::vector<ibv_sge> pieces_;
};

}  // namespace xpyd::disagg::rdma

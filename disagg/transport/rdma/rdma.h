// The rdma wire, and the poster's half of it: transfers, and the ends of links that reach into peers' memory. The
// owner's half is rdma_serving.h.
//
// A transfer's copies become requests (neighbours on the remote side gathered into one), requests go out in batches
// with one completion each, and a queue takes batches up to a limit of bytes and requests; the rest waits for poll().
// The last request of a write carries the window's generation as immediate data, which is how its arrival is counted;
// of a read an empty write does, behind a fence. With several rails each batch takes the rail with the fewest bytes
// under way, and the last request waits until the others have arrived.
//
// What cannot be called back is ended by destroying the queue pairs: afterwards no byte moves, and everything that was
// under way on this link has failed. The link is then renewed over its channel, while further posts wait.
//
// Thread safety: the instance's thread; mail comes from the channels' thread.
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
// What the owner's side has sent.
struct Mail {
  std::mutex mutex;
  std::unordered_map<uint32_t, KeysOfRegistration> keys;  // by index
  std::optional<std::vector<NicPortEnd>> renewed;
  std::atomic<bool> left = false;
  std::atomic<bool> news = false;  // one of these two
  std::atomic<uint64_t> synced = 0;
  bool take(const Message& message);  // false: nonsense
};
struct Link;
struct Transfer {
  std::shared_ptr<Link> link;
  KvTransfer what;
  double until_s = 0;  // cancelled: what is under way is waited for; 0: it is not
  std::vector<Copy> copies;
  int64_t mark = 0;  // device memory: the source is there when the queue has reached it
  enum { seeking, moving, sent, stopped, refused, done, failed } stage = seeking;
  uint64_t sync = 0;  // seeking, refused: asked the owner (0: not yet)
  KeysOfRegistration keys;
  bool planned = false;
  Requests requests;
  size_t next = 0;           // of requests
  int nic_port = -1;         // of a transfer that is not striped
  std::vector<int> batches;  // under way, by rail
  int n_batches = 0;
  bool settled() const { return stage == done || stage == failed; }
};
struct Batch {
  Transfer* transfer;
  int requests;
  size_t bytes;
};
struct QueuePair {  // of a link, on one rail
  Queue queue;
  uint32_t serial = 0;  // in ids of completions; of this queue pair only
  std::deque<Batch> batches;
  int requests = 0;  // under way
  size_t bytes = 0;
};
struct Link {
  std::string address;
  std::vector<AddressRange> regions;
  ChannelPtr channel;  // held()
  std::shared_ptr<Mail> mail;
  std::vector<QueuePair> queue_pairs;
  enum { ready, renewing, lost } state = ready;
  std::deque<Transfer*> waiting;  // those with something left to post or to hear
  uint64_t last_sync = 0;
  bool dead() const { return state == lost || mail->left; }
};
struct Connected {     // a peer that has answered
  ChannelPtr channel;  // held()
  std::shared_ptr<Mail> mail;
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
  int64_t strangers() const override { return bootstrap_.refused(); }

  // What becomes of transfers.
  ChannelEvents accepted(const ChannelPtr& channel, PeerId peer);  // on the meeting's thread
  Status call(const std::string& address, const std::shared_ptr<Answer<Connected>>& answer);
  Result<std::shared_ptr<Link>> answered(const std::string& address, Connected& met);
  void pump(Link& link);
  void seek(Link& link, Transfer& t);
  void refuse(Link& link, Transfer& t);
  void settle(Transfer& t, bool good);
  // Lines: what goes out, comes back, breaks and is renewed.
  bool advance(Link& link, Transfer& t);  // false: the queues are full
  bool send_batch(Link& link, Transfer& t, size_t nic_port);
  void poll_completions();
  void completed(size_t nic_port, const ibv_wc& wc);
  void number_lines(Link& link, std::vector<Queue>& queues);
  std::vector<Transfer*> drop_queues(Link& link);  // those that were under way
  void renew(Link& link, Transfer* culprit, bool refused);
  void read_mail(Link& link);
  void die(Link& link);

  std::vector<NicPort> nic_ports_;
  mutable Serving serving_;
  Bootstrap bootstrap_;
  const RequestLimits limits_;
  Clock& clock_;
  DeviceQueue* const device_queue_;  // where the KV memory is a device's, whose work fills it in order
  Calls<Connected> calls_;
  struct Place {
    Link* link;
    size_t nic_port;
  };
  std::unordered_map<uint32_t, Place> places_;  // of lines, by serial
  std::vector<int> nic_port_requests_;          // under way on each rail
  uint32_t last_serial_ = 0;
  std::vector<ibv_send_wr> requests_;  // of the batch that is being made
  std::vector<ibv_sge> pieces_;
};

}  // namespace xpyd::disagg::rdma

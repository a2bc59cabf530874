// The poster's half of the rdma wire: transfers, and the ends of links that reach into peers' memory.
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
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "disagg/transport/rdma_plan.h"
#include "disagg/transport/rdma_verbs.h"
#include "disagg/transport/window_table.h"

namespace xpyd::disagg::rdma {

class Posting {
 public:
  // device_queue: not null where the KV memory is a device's, whose work fills it in order.
  Posting(std::vector<Rail>& rails, const TransportOptions& options, DeviceQueue* device_queue, Meeting& meeting);
  ~Posting();

  // As KvTransport says it.
  Result<bool> connect(PeerId peer, const std::string& address);
  void disconnect(PeerId peer);
  std::byte* remote(PeerId peer, int region) const;
  TransferId post(const KvTransfer& transfer, const TransferPlan& plan);
  TransferState poll(TransferId id);
  void cancel(TransferId id);
  TransportStats stats() const { return stats_; }  // without `refused`

 private:
  using Keys = std::shared_ptr<const WindowKeys>;
  // What the owner's side has sent.
  struct Mail {
    std::mutex mutex;
    std::unordered_map<uint32_t, Keys> keys;  // by index
    std::optional<std::vector<RailEnd>> renewed;
    bool left = false;
    std::atomic<bool> news = false;  // one of these two
    std::atomic<uint64_t> synced = 0;
    bool take(const Message& message);  // false: nonsense
  };
  struct Transfer {
    TransferId id = 0;  // 0: none; the place is free
    KvTransfer what;
    std::vector<Copy> copies;
    int64_t mark = 0;  // device memory: the source is there when the queue has reached it
    enum { seeking, moving, sent, stopped, refused, done, failed } stage = seeking;
    uint64_t sync = 0;  // seeking, refused: asked the owner (0: not yet)
    Keys keys;
    bool planned = false;
    Requests requests;
    size_t next = 0;           // of requests
    int rail = -1;             // of a transfer that is not striped
    std::vector<int> batches;  // under way, by rail
    int n_batches = 0;
    bool settled() const { return stage == done || stage == failed; }
  };
  struct Batch {
    Transfer* transfer;
    int requests;
    size_t bytes;
  };
  struct Line {  // of a link, on one rail
    Queue queue;
    uint32_t serial = 0;  // in ids of completions; of this queue pair only
    std::deque<Batch> batches;
    int requests = 0;  // under way
    size_t bytes = 0;
  };
  struct Link {
    PeerId peer;
    std::string address;
    std::vector<AddressRange> regions;
    HeldChannel channel;
    std::shared_ptr<Mail> mail;
    std::vector<Line> lines;
    enum { ready, renewing, dead } state = ready;
    std::deque<Transfer*> waiting;  // those with something left to post or to hear
    uint64_t last_sync = 0;
    WindowNumbers counted;
  };
  struct Met {  // a peer that has answered
    HeldChannel channel;
    std::shared_ptr<Mail> mail;
    std::vector<Queue> queues;
    Offer offer;
  };

  // What becomes of transfers.
  Status call(const std::string& address, const std::shared_ptr<Answer<Met>>& answer);
  Status answered(PeerId peer, const std::string& address, Met& met);
  Link* find(PeerId peer);
  Transfer* find_transfer(TransferId id);
  Transfer& new_transfer();
  void pump(Link& link);
  void seek(Link& link, Transfer& t);
  void refuse(Link& link, Transfer& t);
  void settle(Transfer& t, bool good);
  // Lines: what goes out, comes back, breaks and is renewed.
  bool advance(Link& link, Transfer& t);  // false: the queues are full
  bool send_batch(Link& link, Transfer& t, size_t rail);
  void poll_completions();
  void completed(size_t rail, const ibv_wc& wc);
  void number_lines(Link& link, std::vector<Queue>& queues);
  std::vector<Transfer*> drop_queues(Link& link);  // those that were under way
  void renew(Link& link, Transfer* culprit, bool refused);
  void read_mail(Link& link);
  void die(Link& link);

  std::vector<Rail>& rails_;
  const std::vector<MemoryRange> regions_;
  const RequestLimits limits_;
  Clock& clock_;
  DeviceQueue* const device_queue_;
  Meeting& meeting_;
  Calls<Met> calls_;
  std::map<PeerId, Link> links_;
  std::vector<std::unique_ptr<Transfer>> transfers_;  // used again: a post allocates nothing
  std::vector<uint32_t> free_places_;                 // in transfers_
  struct Place {
    Link* link;
    size_t rail;
  };
  std::unordered_map<uint32_t, Place> places_;  // of lines, by serial
  std::vector<int> rail_requests_;              // under way on each rail
  uint32_t last_serial_ = 0;
  int64_t last_transfer_ = 0;
  TransportStats stats_;
  std::vector<ibv_send_wr> requests_;  // of the batch that is being made
  std::vector<ibv_sge> pieces_;
};

}  // namespace xpyd::disagg::rdma

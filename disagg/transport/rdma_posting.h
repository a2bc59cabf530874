// The poster's half of the rdma wire: transfers, and the ends of links that reach into peers'
// memory.
//
// A transfer's copies become requests (neighbours on the remote side gathered into one), requests
// go out in batches with one completion each, and a queue takes batches up to a limit of bytes and
// requests; the rest waits for poll(). The last request of a write carries the window's generation
// as immediate data, which is how its arrival is counted; of a read an empty write does, behind a
// fence. With several rails each batch takes the rail with the fewest bytes under way, and the last
// request waits until the others have arrived.
//
// What cannot be called back is ended by destroying the queue pairs: afterwards no byte moves, and
// everything that was under way on this link has failed. The link is then renewed over its channel,
// while further posts wait.
//
// Thread safety: the instance's thread; mail comes from the channels' thread.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "disagg/transport/rdma_link.h"
#include "disagg/transport/side_channel.h"

namespace xpyd::rdma {

class Posting {
 public:
  // device_queue: not null where the KV memory is a device's, whose work fills it in order.
  Posting(std::vector<Rail>& rails, std::vector<MemoryRange> regions, Clock& clock,
          DeviceQueue* device_queue);
  ~Posting();

  Status connect(PeerId self, PeerId peer, const Address& address, SideChannels& channels);
  void disconnect(PeerId peer);
  std::byte* remote(PeerId peer, int region) const;
  TransferId post(const KvTransfer& transfer, const TransferPlan& plan);
  TransferState poll(TransferId id);
  void cancel(TransferId id);
  TransportStats stats() const { return stats_; }  // without `refused`

 private:
  // What the owner's side has sent.
  struct Mail {
    std::mutex mutex;
    std::unordered_map<uint32_t, WindowKeys> keys;  // by index
    uint64_t synced = 0;
    std::optional<std::vector<RailEnd>> renewed;
    bool left = false;
    bool take(const Message& message);  // false: nonsense
  };
  struct Batch {
    TransferId transfer;
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
    Address address;
    std::shared_ptr<SideChannel> channel;
    std::shared_ptr<Mail> mail;
    std::vector<Line> lines;
    enum { ready, renewing, dead } state = ready;
    std::deque<TransferId> waiting;  // those with something left to post or to hear
    uint64_t last_sync = 0;
  };
  struct Request {
    uint64_t remote;
    uint32_t range;  // of the window's
    uint32_t first_piece, pieces;
    uint32_t bytes;
  };
  struct Transfer {
    KvTransfer what;
    std::vector<Copy> copies;
    size_t bytes = 0;
    int64_t mark = 0;  // device memory: the source is there when the queue has reached it
    enum { seeking, moving, sent, stopped, refused, done, failed } stage = seeking;
    uint64_t sync = 0;  // seeking, refused: asked the owner (0: not yet)
    WindowKeys keys;
    bool planned = false;
    std::vector<Request> requests;
    std::vector<ibv_sge> pieces;  // lkey: the region's number
    size_t next = 0;              // of requests
    int rail = -1;                // of a transfer that is not striped
    std::vector<int> batches;     // under way, by rail
    int n_batches = 0;
  };

  Link* find(PeerId peer);
  bool plan(Transfer& t) const;
  bool find_local(const std::byte* at, size_t bytes, size_t& region) const;
  void seek(Link& link, Transfer& t);
  void refuse(Link& link, Transfer& t);
  bool advance(Link& link, TransferId id, Transfer& t);  // false: the queues are full
  bool send_batch(Link& link, TransferId id, Transfer& t, size_t rail);
  void pump(Link& link);
  void read_mail(Link& link);
  void poll_completions();
  void completed(size_t rail, const ibv_wc& wc);
  void settle(Transfer& t, bool good);
  void leave_queue(Link& link, TransferId id);
  std::vector<TransferId> drop_queues(Link& link);  // whose transfers were under way
  void renew(Link& link, TransferId culprit, bool refused);
  void die(Link& link);
  void number_lines(Link& link, std::vector<Queue>& queues);

  std::vector<Rail>& rails_;
  const std::vector<MemoryRange> regions_;
  Clock& clock_;
  DeviceQueue* const device_queue_;
  std::map<PeerId, Link> links_;
  std::unordered_map<TransferId, Transfer> transfers_;
  struct Place {
    Link* link;
    size_t rail;
  };
  std::unordered_map<uint32_t, Place> places_;  // of lines, by serial
  std::vector<int> rail_requests_;              // under way on each rail
  uint32_t last_serial_ = 0;
  TransferId last_id_ = 0;
  TransportStats stats_;
  std::vector<ibv_send_wr> requests_;  // of the batch that is being made
  std::vector<ibv_sge> pieces_;
};

}  // namespace xpyd::rdma

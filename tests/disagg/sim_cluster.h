// A cluster on one thread under a virtual clock: the real conductor and instances with the checksum model, joined by a
// network that the test controls. Time passes in ticks of a millisecond. In each tick due messages are delivered, and
// every instance that runs takes a turn.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "disagg/conductor/conductor.h"
#include "disagg/instance/cluster.h"
#include "disagg/messages.h"
#include "tests/disagg/checksum_model.h"
#include "tests/link_device.h"
#include "tests/tiny_model.h"

namespace xpyd::testing {

struct SimOptions {
  std::string scheme = "paged";
  KvOptions kv;  // shape is the checksum model's
  StreamKv stream_kv = StreamKv::layer;
  int step_tokens = 16, max_batch = 4;
  SpeculationOptions speculation;
  double tier_byte_s = 0;   // of the link to the host, with kv.tiers
  bool far_caches = false;  // the conductor knows the instances' prefix caches by their reports alone
  double lease_s = 0.4;
  ConductorOptions conductor;
  std::function<std::unique_ptr<KvTransport>(const TransportOptions&)> transport;  // null: local
};

class SimCluster : public MessageBus {
 public:
  struct Node {
    InstanceId id = -1;
    Role role = Role::colocated;
    std::string name;
    std::unique_ptr<DeviceQueue> queue;
    std::unique_ptr<Instance> instance;
    std::shared_ptr<PrefixLog> log;  // far_caches
    double stopped_until_s = 0;
    double step_s = 0;  // of a step; other threads of its process go on meanwhile
    double busy_until_s = 0;
    bool leaving = false;
    int zombie_turns = -1;  // it was declared gone, and notices after so many
  };
  using NodePtr = std::shared_ptr<Node>;

  ~SimCluster() override { close(); }
  // Ends every instance while the conductor, and what a derived class has made for them, still exist.
  void close() {
    due = nullptr;
    for (auto& [id, node] : nodes) node->instance.reset();
    nodes.clear();
  }
  // Ends the log's last owner, so that the file is whole. After close().
  void forget_log() {
    conductor_.reset();
    options_.conductor.log.reset();
  }
  // options.conductor and options.kv need only what differs from a small, ordinary cluster.
  void open(SimOptions options);
  NodePtr add(Role role);
  void add_all(const std::string& topology);
  // The instance's memory and unsent messages are lost. If `noticed`, the conductor's connection to it breaks.
  void crash(InstanceId id, bool noticed);
  void tick();
  void ticks(int n) {
    for (int i = 0; i < n; ++i) tick();
  }
  // Returns what is wrong with memories and load, or "". `at_rest`: nobody owns anything.
  std::string check_memory(bool at_rest) const;

  Conductor& conductor() { return *conductor_; }
  Node* find(const std::string& name);  // null: not there
  void send(InstanceId from, InstanceId to, Message message) override;

  VirtualClock clock;
  double conductor_stopped_until_s = 0;  // then it looks for silent instances before it reads its messages
  std::map<InstanceId, NodePtr> nodes;
  // When a message that is sent now arrives, in Clock seconds; below 0: never. Null: at the next tick.
  std::function<double(InstanceId from, InstanceId to, const Message&)> due;

 private:
  class Probe;
  struct Letter {
    double due_s;
    uint64_t sequence;
    InstanceId from, to;
    Message message;
    bool operator<(const Letter& other) const {
      return std::pair(due_s, sequence) < std::pair(other.due_s, other.sequence);
    }
  };

  SimOptions options_;
  const KvScheme* scheme_ = nullptr;
  std::unique_ptr<LinkDevice> link_;
  std::unique_ptr<Conductor> conductor_;
  std::set<Letter> letters_;
  std::map<std::pair<InstanceId, InstanceId>, double> last_due_s_;
  uint64_t letter_ = 0;
  int ticks_ = 0;
};

const char* message_name(const Message& message);

}  // namespace xpyd::testing

// A small cluster in virtual time whose transport waits for the test.
#pragma once

#include <functional>
#include <set>

#include "disagg/handover/attempts.h"
#include "tests/catch.h"
#include "tests/disagg/sim_cluster.h"
#include "tests/wrapped_transport.h"

namespace xpyd::testing {

// The local transport. Its transfers arrive when the test lets them.
class HeldTransport final : public FlyingTransport {
 public:
  struct Hand {
    bool holds = false;
    int close_late = 0;  // so many calls of close() return false
    std::set<HeldTransport*> transports;
    // Lets all transfers arrive, except the last one if it is to fail.
    void let_go(bool last_fails = false) {
      holds = false;
      for (HeldTransport* transport : transports) transport->let_go(last_fails);
    }
  };
  HeldTransport(const TransportOptions& options, Hand& hand)
      : FlyingTransport(options), clock_(*options.clock), hand_(hand) {
    hand_.transports.insert(this);
  }
  ~HeldTransport() override { hand_.transports.erase(this); }
  // The first calls may answer that somebody is still inside. A registration that is closing counts nothing.
  bool close(const RemoteKey& registration) override {
    closing_ = hand_.close_late > 0;
    if (!closing_) return WrappedTransport::close(registration);
    --hand_.close_late;
    return false;
  }
  int arrived(const RemoteKey& registration) const override {
    return closing_ ? 0 : WrappedTransport::arrived(registration);
  }

 private:
  void posted(TransferId, Flight& flight) override {
    if (!hand_.holds) arrive(flight);
  }
  void looked_at(Flight& flight) override {
    if (clock_.now() > flight.transfer.deadline_s) flight.state = TransferState::failed;
  }
  void let_go(bool last_fails) {
    for (auto& [id, flight] : flights_) {
      if (flight.state != TransferState::in_flight) continue;
      if (last_fails && id == flights_.rbegin()->first)
        flight.state = TransferState::failed;
      else
        arrive(flight);
    }
  }
  Clock& clock_;
  Hand& hand_;
  bool closing_ = false;
};

// A small, ordinary cluster with this order of P and D.
inline SimOptions in(const char* disagg, bool pull = false) {
  SimOptions options;
  options.conductor.disagg = find_disagg_policy(disagg);
  options.conductor.disagg_options.pull = pull;
  return options;
}

// The instances, their clients, and the tokens that these must have at the end.
class Scene : public SimCluster {
 public:
  explicit Scene(const std::string& topology, SimOptions options = {}) {
    if (!options.transport)
      options.transport = [this](const TransportOptions& transport) {
        return std::make_unique<HeldTransport>(transport, hand);
      };
    open(std::move(options));
    add_all(topology);
    tick();
  }
  ~Scene() override { close(); }
  void ask(uint64_t id, int length, int max_tokens, int family, double deadline_s = 0) {
    std::vector<int32_t> prompt;
    for (int i = 0; i < length; ++i) prompt.push_back((i * 5 + family * 17) % 251);
    ask(id, prompt, max_tokens, deadline_s);
  }
  void ask(uint64_t id, const std::vector<int32_t>& prompt, int max_tokens, double deadline_s = 0) {
    auto request = tiny_request(id, prompt, max_tokens);
    request->ignore_eos = true;
    request->arrival_s = clock.seconds;
    request->deadline_s = deadline_s;
    if (deadline_s == 0) expected_[id] = checksum_tokens(prompt, max_tokens);
    REQUIRE(conductor().submit(request, recorder).ok());
  }
  void abort(uint64_t id) {
    expected_.erase(id);
    conductor().abort(id);
  }
  // Ticks until a message of this kind is sent and on its way.
  template <class Kind>
  void until_sent() {
    bool sent = false;
    due = [&](InstanceId, InstanceId, const Message& m) {
      sent |= std::holds_alternative<Kind>(m);
      return clock.seconds;
    };
    for (int i = 0; i < 300 && !sent; ++i) tick();
    due = nullptr;
    REQUIRE(sent);
  }
  // A request whose KV is delivered while its last transfers are held.
  void deliver_and_hold() {
    hand.holds = true;
    ask(1, 60, 12, 1);
    until_sent<KvDelivered>();
    ticks(20);
    CHECK(n_tokens(1) == 1);  // from P
  }
  int n_tokens(uint64_t id) { return int(recorder->choice(id).tokens.size()); }
  int cached(uint64_t id) { return recorder->choice(id).cached_tokens; }
  KvMemory& memory(const char* name) { return find(name)->instance->memory(); }
  KvStats kv(const char* name) { return memory(name).stats(); }
  InstanceStats stats(const char* name) { return find(name)->instance->stats(); }
  // Ticks until nobody owns memory any more.
  void rest(int most = 20000, int then = 800) {
    for (int i = 0; i < most && !conductor().wait_idle(0); ++i) tick();
    ticks(then);
    CHECK(check_memory(true) == "");
  }
  // Each request that was not aborted has ended once, with the expected tokens.
  void check_answers() {
    for (const auto& [id, tokens] : expected_) {
      CHECK(recorder->choice(id).ends == 1);
      CHECK(recorder->choice(id).tokens == tokens);
    }
  }
  void settle() {
    rest();
    check_answers();
  }
  void serve(uint64_t id, int length, int max_tokens, int family) {
    ask(id, length, max_tokens, family);
    settle();
  }

  HeldTransport::Hand hand;
  std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>();

 private:
  std::map<uint64_t, std::vector<int32_t>> expected_;
};

}  // namespace xpyd::testing

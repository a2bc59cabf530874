// A small cluster in virtual time whose wire waits for the test.
#pragma once

#include <functional>
#include <set>

#include "disagg/attempts.h"
#include "tests/catch.h"
#include "tests/disagg/sim_cluster.h"
#include "tests/wrapped_transport.h"

namespace xpyd::testing {

// The local wire, whose posts arrive when a test lets them.
class HeldWire final : public WrappedTransport {
 public:
  struct Hand {
    bool holds = false;
    int close_late = 0;  // so many calls of close() say: not yet
    std::set<HeldWire*> wires;
    // All arrive, but for the last one, where it is to fail.
    void let_go(bool last_fails = false) {
      holds = false;
      for (HeldWire* wire : wires) wire->let_go(last_fails);
    }
  };
  HeldWire(const TransportOptions& options, Hand& hand)
      : WrappedTransport("local", options), clock_(*options.clock), hand_(hand) {
    hand_.wires.insert(this);
  }
  ~HeldWire() override { hand_.wires.erase(this); }
  TransferId post(const KvTransfer& transfer, const TransferPlan& plan) override {
    Flight& flight = flights_[++last_] = {transfer, plan};
    if (!hand_.holds) arrive(flight);
    return last_;
  }
  TransferState poll(TransferId id) override {
    Flight& flight = flights_.at(id);
    if (flight.state == TransferState::in_flight && clock_.now() > flight.transfer.deadline_s)
      flight.state = TransferState::failed;
    const TransferState state = flight.state;
    if (state != TransferState::in_flight) flights_.erase(id);
    return state;
  }
  void cancel(TransferId id) override { flights_.at(id).state = TransferState::failed; }
  // Somebody is still inside. Of such a window nothing is counted.
  bool close(const WindowKey& window) override {
    closing_ = hand_.close_late > 0;
    if (!closing_) return WrappedTransport::close(window);
    --hand_.close_late;
    return false;
  }
  int arrived(const WindowKey& window) const override { return closing_ ? 0 : WrappedTransport::arrived(window); }

 private:
  struct Flight {
    KvTransfer transfer;
    TransferPlan plan;
    TransferState state = TransferState::in_flight;
  };
  void arrive(Flight& flight) {
    if (flight.state == TransferState::in_flight)
      flight.state = WrappedTransport::poll(WrappedTransport::post(flight.transfer, flight.plan));
  }
  void let_go(bool last_fails) {
    for (auto& [id, flight] : flights_)
      if (last_fails && id == flights_.rbegin()->first)
        flight.state = TransferState::failed;
      else
        arrive(flight);
  }
  Clock& clock_;
  Hand& hand_;
  std::map<TransferId, Flight> flights_;
  TransferId last_ = 0;
  bool closing_ = false;
};

class Scene : public SimCluster {
 public:
  explicit Scene(const std::string& topology, SimOptions options = {}) {
    options.wire = [this](const TransportOptions& wire) { return std::make_unique<HeldWire>(wire, hand); };
    options.lease_s = 0.4;
    open(std::move(options));
    add_all(topology);
    tick();
  }
  ~Scene() override { close(); }
  void ask(uint64_t id, int length, int max_tokens, int family) {
    std::vector<int32_t> prompt;
    for (int i = 0; i < length; ++i) prompt.push_back((i * 5 + family * 17) % 251);
    auto request = tiny_request(id, prompt, max_tokens);
    request->ignore_eos = true;
    request->arrival_s = clock.seconds;
    expected_[id] = checksum_tokens(prompt, max_tokens);
    REQUIRE(conductor().submit(request, recorder).ok());
  }
  // A request whose KV is delivered, and held.
  void deliver_and_hold() {
    hand.holds = true;
    ask(1, 60, 12, 1);
    bool delivered = false;
    due = [&](InstanceId, InstanceId, const Message& m) {
      delivered |= std::holds_alternative<KvDelivered>(m);
      return clock.seconds;
    };
    for (int i = 0; i < 300 && !delivered; ++i) tick();
    due = nullptr;
    REQUIRE(delivered);
    ticks(20);
    CHECK(n_tokens(1) == 1);  // P's
  }
  int n_tokens(uint64_t id) { return int(recorder->choice(id).tokens.size()); }
  InstanceStats stats(const char* name) { return find(name)->instance->stats(); }
  void settle() {
    for (int i = 0; i < 20000 && !conductor().wait_idle(0); ++i) tick();
    ticks(800);
    CHECK(check_memory(true) == "");
    for (const auto& [id, tokens] : expected_) {
      CHECK(recorder->choice(id).ends == 1);
      CHECK(recorder->choice(id).tokens == tokens);
    }
  }

  HeldWire::Hand hand;
  std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>();

 private:
  std::map<uint64_t, std::vector<int32_t>> expected_;
};

}  // namespace xpyd::testing

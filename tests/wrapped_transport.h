// A transport of the table with something around it, for tests that change a detail of it.
#pragma once

#include <map>

#include "experiments/forwarding.h"

namespace xpyd::testing {

class WrappedTransport : public ForwardingTransport {
 public:
  WrappedTransport(const char* transport, const TransportOptions& options)
      : ForwardingTransport(find_transport(transport)->make(options).value()) {}
};

// The local transport. Its transfers are under way until a derived class decides what becomes of them.
class FlyingTransport : public WrappedTransport {
 public:
  explicit FlyingTransport(const TransportOptions& options) : WrappedTransport("local", options) {}
  TransferId post(const KvTransfer& transfer, const TransferPlan& plan) override {
    flights_[++last_] = {transfer, plan};
    posted(last_, flights_[last_]);
    return last_;
  }
  TransferState poll(TransferId id) override {
    Flight& flight = flights_.at(id);
    if (flight.state == TransferState::in_flight) looked_at(flight);
    const TransferState state = flight.state;
    if (state != TransferState::in_flight) flights_.erase(id);
    return state;
  }
  void cancel(TransferId id) override {
    Flight& flight = flights_.at(id);
    if (flight.state == TransferState::in_flight) flight.state = TransferState::failed;
  }

 protected:
  struct Flight {
    KvTransfer transfer;
    TransferPlan plan;
    TransferState state = TransferState::in_flight;
  };
  virtual void posted(TransferId, Flight&) {}
  virtual void looked_at(Flight&) {}
  void arrive(Flight& flight) {
    flight.state = WrappedTransport::poll(WrappedTransport::post(flight.transfer, flight.plan));
  }
  std::map<TransferId, Flight> flights_;

 private:
  TransferId last_ = 0;
};

}  // namespace xpyd::testing

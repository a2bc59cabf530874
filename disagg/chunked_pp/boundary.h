// The boundary between two stages that are processes: the residual stream of a wave, [tokens, hidden] of f32, goes by a
// KvTransport into a place of the receiver's; and so do the logits, from the last stage to the head.
//
// There is a place for every wave that can be under way, with a window of its own as long as the instance lives. Rows
// that do not arrive end the instance, so nothing that comes late finds other rows in its place.
//
// Thread safety: the thread of the transport.
#pragma once

#include <memory>
#include <vector>

#include "disagg/transport/transport.h"

namespace xpyd::disagg::ranks {

constexpr double kPostSeconds = 5;  // until rows that do not arrive are given up

// Waiting for what another process will do, without a word from it: a look every sixteenth of the time that it has
// taken so far, between 5 and 50 us.
class Naps {
 public:
  void nap();

 private:
  double since_s_ = 0;
};

class BoundaryIn {
 public:
  // Of rows of at most `floats` in each of so many places.
  static Result<BoundaryIn> make(const TransportRow& transport, int places, size_t floats, bool checksum);
  MemoryRange region() const { return {memory_.get(), taken_.size() * place_bytes_}; }
  // Windows of all places, once.
  Result<std::vector<RemoteKey>> open(KvTransport& transport, PeerId from);
  // Rows have come to that place which were not taken.
  bool arrived(const KvTransport& transport, int place) const {
    return transport.arrived(registrations_[size_t(place)]) != taken_[size_t(place)];
  }
  // Before: they have arrived. They stay until the next ones come; null: they are not as they were sent.
  const float* take(int place, size_t floats);

 private:
  size_t place_bytes_ = 0;
  bool checksum_ = false;
  std::shared_ptr<std::byte> memory_;
  std::vector<RemoteKey> registrations_;  // [places]
  std::vector<int> taken_;                // [places]
};

class BoundaryOut {
 public:
  // Rows wait in one of two `slots` until they have left.
  BoundaryOut(KvTransport& transport, Clock& clock, PeerId to, size_t floats, bool checksum);
  void post(int slot, const float* rows, size_t floats, int place, const RemoteKey& registration);
  // Nothing of that slot is under way. Error `io`: it did not arrive.
  Result<bool> left(int slot);

 private:
  struct Slot {
    uint64_t checksum = 0;
    TransferId id = -1;  // -1: none
    TransferPlan plan;
  };
  KvTransport& transport_;
  Clock& clock_;
  const PeerId to_;
  const size_t place_bytes_;
  const bool checksum_;
  Slot slots_[2];
};

}  // namespace xpyd::disagg::ranks

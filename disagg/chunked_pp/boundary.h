// The boundary between two pipeline stages in different processes. A KvTransport writes the residual stream of a wave,
// f32 [tokens, hidden], into a place of the receiver. The logits go from the last stage to the head in the same way.
//
// Each wave that can be in flight has a place, with a registration that stays open as long as the instance lives. Rows
// that do not arrive end the instance, so a late write never meets rows of another wave in its place.
//
// Thread safety: the thread that owns the transport.
#pragma once

#include <memory>
#include <vector>

#include "disagg/transport/transport.h"

namespace xpyd::disagg::ranks {

constexpr double kPostSeconds = 5;  // deadline for rows to arrive

// Sleeps between two looks at what another process does without telling. A nap takes a sixteenth of the time since the
// first one, at least 5 and at most 50 us.
class Naps {
 public:
  void nap();

 private:
  double since_s_ = 0;
};

// The receiving end of a boundary.
class BoundaryIn {
 public:
  // Allocates `places` places for at most `floats` floats each.
  static Result<BoundaryIn> make(const TransportRow& transport, int places, size_t floats);
  MemoryRange region() const { return {memory_.get(), taken_.size() * place_bytes_}; }
  // Opens a registration for each place and returns their remote keys. Call it once.
  Result<std::vector<RemoteKey>> open(KvTransport& transport, PeerId from);
  // True if rows have arrived in that place since the last take().
  bool arrived(const KvTransport& transport, int place) const {
    return transport.arrived(registrations_[size_t(place)]) != taken_[size_t(place)];
  }
  // Returns the rows, which stay valid until the next rows arrive in that place.
  // Requires: arrived(place).
  const float* take(int place);

 private:
  size_t place_bytes_ = 0;
  std::shared_ptr<std::byte> memory_;
  std::vector<RemoteKey> registrations_;  // [places]
  std::vector<int> taken_;                // [places]
};

// The sending end of a boundary. It has two slots, so that one wave is computed while another leaves.
class BoundaryOut {
 public:
  BoundaryOut(KvTransport& transport, Clock& clock, PeerId to, size_t floats);
  // Starts to write the rows into a place of the receiver. They must stay unchanged until left(slot). Requires:
  // left(slot).
  void post(int slot, const float* rows, size_t floats, int place, const RemoteKey& registration);
  // True if no rows of that slot are in flight. Error `io`: they did not arrive.
  Result<bool> left(int slot);

 private:
  struct Slot {
    TransferId id = -1;  // -1: none
    TransferPlan plan;
  };
  KvTransport& transport_;
  Clock& clock_;
  const PeerId to_;
  const size_t place_bytes_;
  Slot slots_[2];
};

}  // namespace xpyd::disagg::ranks

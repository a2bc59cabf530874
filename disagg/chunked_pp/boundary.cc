#include "disagg/chunked_pp/boundary.h"

#include <algorithm>

#include "base/device/device.h"
#include "base/os.h"
#include "base/wait_word.h"

namespace xpyd::disagg::ranks {
namespace {

// The first stage receives nothing, but a transport registers no empty range.
size_t bytes_of_place(size_t floats) { return round_up(std::max<size_t>(floats, 1) * sizeof(float), kCacheLine); }

}  // namespace

void Naps::nap() {
  RealClock clock;
  const double now = clock.now();
  if (since_s_ == 0) since_s_ = now;
  clock.sleep(std::clamp((now - since_s_) / 16, 5e-6, 5e-5));
}

Result<BoundaryIn> BoundaryIn::make(const TransportRow& transport, int places, size_t floats) {
  BoundaryIn made;
  made.place_bytes_ = bytes_of_place(floats);
  made.taken_.resize(size_t(places));
  Device& device = transport.pool_device ? transport.pool_device() : cpu_device();
  Result<std::shared_ptr<std::byte>> memory = device.allocate(size_t(places) * made.place_bytes_);
  if (!memory) return memory.error();
  made.memory_ = std::move(memory).value();
  return made;
}

Result<std::vector<RemoteKey>> BoundaryIn::open(KvTransport& transport, PeerId from) {
  for (size_t place = 0; place < taken_.size(); ++place) {
    const MemoryRange range{memory_.get() + place * place_bytes_, place_bytes_};
    const Result<RemoteKey> registration = transport.open(from, KvOp::write, std::span(&range, 1));
    if (!registration) return registration.error();
    registrations_.push_back(registration.value());
  }
  return registrations_;
}

const float* BoundaryIn::take(int place) {
  ++taken_[size_t(place)];
  return reinterpret_cast<const float*>(memory_.get() + size_t(place) * place_bytes_);
}

BoundaryOut::BoundaryOut(KvTransport& transport, Clock& clock, PeerId to, size_t floats)
    : transport_(transport), clock_(clock), to_(to), place_bytes_(bytes_of_place(floats)) {}

void BoundaryOut::post(int slot, const float* rows, size_t floats, int place, const RemoteKey& registration) {
  Slot& s = slots_[slot];
  XPYD_CHECK(s.id < 0 && floats * sizeof(float) <= place_bytes_);
  std::byte* to = transport_.remote(to_, 0) + size_t(place) * place_bytes_;
  s.plan.copies.clear();
  s.plan.bytes = floats * sizeof(float);
  s.plan.copies.push_back({reinterpret_cast<const std::byte*>(rows), to, floats * sizeof(float)});
  s.id = transport_.post(
      {.peer = to_, .op = KvOp::write, .registration = registration, .deadline_s = clock_.now() + kPostSeconds},
      s.plan);
}

Result<bool> BoundaryOut::left(int slot) {
  Slot& s = slots_[slot];
  if (s.id < 0) return true;
  const TransferState state = transport_.poll(s.id);
  if (state == TransferState::in_flight) return false;
  s.id = -1;
  if (state == TransferState::failed)
    return Error{ErrorCode::io, "the next stage did not receive what this stage computed"};
  return true;
}

}  // namespace xpyd::disagg::ranks

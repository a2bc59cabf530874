// The arithmetic of the rdma wire, which needs no device: the ranges that a window has keys for,
// the requests that the copies of a transfer become, and how many of them go out at a time.
//
// Thread safety: functions and plain values.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "disagg/transport/rdma/rdma_messages.h"

namespace xpyd::disagg::rdma {

// The first of the regions that holds these bytes; their number: none does.
size_t region_of(std::span<const MemoryRange> regions, const std::byte* at, size_t bytes);

// What a window of these pieces has keys for: sorted, neighbours of one region joined. More than kMaxKeys are
// covered by fewer, longer ranges, over the smallest gaps. Error: a piece is outside the regions.
Result<std::vector<AddressRange>> cover(std::span<const MemoryRange> pieces, std::span<const MemoryRange> regions);

// One RDMA request: remote bytes in one range of the window, gathered from (or scattered to) local pieces in order.
struct Request {
  uint64_t remote;
  uint32_t range;  // of the window's
  uint32_t first_piece, n_pieces;
  uint32_t bytes;
};
struct LocalPiece {
  uint64_t address;
  uint32_t bytes, region;
};
struct Requests {
  std::vector<Request> list;
  std::vector<LocalPiece> pieces;
  size_t bytes = 0;
};
struct RequestLimits {
  size_t bytes;
  uint32_t pieces;
};

// Neighbours on the remote side become one request. False: something there is outside the window.
// The local sides lie within `regions`.
bool plan_requests(std::span<const Copy> copies, const RegistrationKeys& registration,
                   std::span<const MemoryRange> regions, const RequestLimits& limits, Requests& planned);

constexpr size_t kBatchBytes = 1 << 20;
constexpr int kBatchRequests = 64;

// Requests `next` to `next + n` of a transfer go out together, with one completion.
struct BatchSize {
  int n = 0;
  bool last = false;    // then all of the transfer is out
  bool notice = false;  // an empty write follows, which the owner counts; it needs a place too
};
// `room`: places in the queue. `alone`: nothing of this transfer is under way on other rails, so
// what the owner counts may go out.
BatchSize next_batch(const Requests& planned, KvOp op, size_t next, int room, bool alone);

}  // namespace xpyd::disagg::rdma

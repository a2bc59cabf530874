// Arithmetic of the rdma transport, without devices: ranges that get remote keys, requests of a transfer, batches.
//
// Thread safety: functions and plain values.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "disagg/transport/transport.h"

namespace xpyd::disagg::rdma {

constexpr size_t kMaxKeys = 256;  // ranges of one registration

// Returns the index of the first region that contains these bytes, or regions.size() if none does.
size_t region_of(std::span<const MemoryRange> regions, const std::byte* at, size_t bytes);

// Returns the ranges that a registration of these pieces gets keys for: sorted, and joined where they are adjacent in
// one region. If there are more than kMaxKeys, it also joins ranges over the smallest gaps. Errors: a piece is outside
// the regions; more than kMaxKeys regions.
Result<std::vector<AddressRange>> cover(std::span<const MemoryRange> pieces, std::span<const MemoryRange> regions);

// One RDMA request: remote bytes in one range of the registration, and the local pieces that they are gathered from or
// scattered to, in order.
struct Request {
  uint64_t remote;
  uint32_t range;  // index into RemoteKey::ranges
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
struct RequestLimits {  // of one request
  size_t bytes;
  uint32_t pieces;
};

// Sets `planned` to the requests of these copies. Copies that are adjacent on the remote side share a request.
// Requires: the local sides lie within `regions`. Returns false if a remote side is outside `ranges`, which are sorted
// and disjoint.
bool plan_requests(std::span<const Copy> copies, KvOp op, std::span<const AddressRange> ranges,
                   std::span<const MemoryRange> regions, const RequestLimits& limits, Requests& planned);

constexpr size_t kBatchBytes = 1 << 20;
constexpr int kBatchRequests = 64;

// Requests [next, next + n) of a transfer are posted together, with one completion.
struct BatchSize {
  int n = 0;
  bool last = false;    // the batch ends the transfer
  bool notice = false;  // an empty write follows, which the owner counts; it takes one more place in the queue
};
// Returns the size of the next batch. `room`: free places in the queue pair. `alone`: no request of this transfer is in
// flight on other NIC ports, so the request that the owner counts may go out.
BatchSize next_batch(const Requests& planned, KvOp op, size_t next, int room, bool alone);

}  // namespace xpyd::disagg::rdma

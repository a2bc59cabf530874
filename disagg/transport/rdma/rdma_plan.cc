#include "disagg/transport/rdma/rdma_plan.h"

#include <algorithm>

#include "disagg/transport/registration_table.h"

namespace xpyd::disagg::rdma {
size_t region_of(std::span<const MemoryRange> regions, const std::byte* at, size_t bytes) {
  const auto inside = [&](const MemoryRange& region) {
    return at >= region.data() && at + bytes <= region.data() + region.size();
  };
  return size_t(std::ranges::find_if(regions, inside) - regions.begin());
}

Result<std::vector<AddressRange>> cover(std::span<const MemoryRange> pieces, std::span<const MemoryRange> regions) {
  std::vector<std::vector<AddressRange>> of(regions.size());
  for (const MemoryRange& piece : pieces) {
    if (piece.empty()) continue;
    const size_t region = region_of(regions, piece.data(), piece.size());
    if (region == regions.size()) return invalid("registration: a range is outside this instance's KV memory");
    of[region].push_back({reinterpret_cast<uint64_t>(piece.data()), piece.size()});
  }
  const auto join_all = [&of](uint64_t gap) {
    std::vector<AddressRange> ranges;
    for (std::vector<AddressRange>& some : of) {
      some = joined(std::move(some), gap);
      ranges.insert(ranges.end(), some.begin(), some.end());
    }
    std::ranges::sort(ranges, {}, &AddressRange::begin);
    return ranges;
  };
  std::vector<AddressRange> ranges = join_all(0);
  if (ranges.size() <= kMaxKeys) return ranges;
  std::vector<uint64_t> gaps;
  for (const std::vector<AddressRange>& some : of)
    for (size_t i = 1; i < some.size(); ++i) gaps.push_back(some[i].begin - some[i - 1].begin - some[i - 1].bytes);
  const size_t n = ranges.size() - kMaxKeys;
  if (n > gaps.size()) return invalid("registration: there are more than 256 regions");
  std::nth_element(gaps.begin(), gaps.begin() + long(n) - 1, gaps.end());
  return join_all(gaps[n - 1]);
}

bool plan_requests(std::span<const Copy> copies, KvOp op, std::span<const AddressRange> ranges,
                   std::span<const MemoryRange> regions, const RequestLimits& limits, Requests& planned) {
  const bool write = op == KvOp::write;
  planned = {};
  uint32_t range = 0;
  for (const Copy& copy : copies) {
    const std::byte* local_side = write ? copy.source : copy.destination;
    auto local = reinterpret_cast<uint64_t>(local_side);
    auto remote = reinterpret_cast<uint64_t>(write ? copy.destination : copy.source);
    const size_t region = copy.bytes == 0 ? 0 : region_of(regions, local_side, copy.bytes);
    XPYD_CHECK(copy.bytes == 0 || region < regions.size(),
               "the local side of a copy is outside the memory of this transport");
    planned.bytes += copy.bytes;
    for (size_t left = copy.bytes; left > 0;) {
      // Consecutive copies mostly lie in the same range.
      if (range >= ranges.size() || remote - ranges[range].begin >= ranges[range].bytes) {
        const AddressRange* found = find_range(ranges, remote, 1);
        if (!found) return false;
        range = uint32_t(found - ranges.data());
      }
      Request* request = planned.list.empty() ? nullptr : &planned.list.back();
      LocalPiece* piece = planned.pieces.empty() ? nullptr : &planned.pieces.back();
      // Adjacent addresses in two memory regions are two pieces.
      const bool longer = piece && piece->address + piece->bytes == local && piece->region == uint32_t(region);
      if (!request || request->range != range || request->remote + request->bytes != remote ||
          request->bytes == limits.bytes || (request->n_pieces == limits.pieces && !longer)) {
        planned.list.push_back({remote, range, uint32_t(planned.pieces.size()), 0, 0});
        request = &planned.list.back();
      }
      const size_t in_range = ranges[range].bytes - (remote - ranges[range].begin);
      const auto n = uint32_t(std::min({left, in_range, limits.bytes - request->bytes}));
      if (longer && request->n_pieces > 0) {
        piece->bytes += n;
      } else {
        planned.pieces.push_back({local, n, uint32_t(region)});
        ++request->n_pieces;
      }
      request->bytes += n;
      local += n, remote += n, left -= n;
    }
  }
  return true;
}

BatchSize next_batch(const Requests& planned, KvOp op, size_t next, int room, bool alone) {
  const bool write = op == KvOp::write;
  const size_t all = planned.list.size();
  BatchSize size;
  // The owner counts the last request of a write. The owner does not see a read, and a write without bytes has no
  // request, so a notice follows them.
  const bool notice = !write || all == 0;
  const int most = std::min(kBatchRequests, room);
  size_t bytes = 0;
  while (next < all && bytes < kBatchBytes && size.n < most && (!write || alone || next + 1 < all)) {
    bytes += planned.list[next++].bytes;
    ++size.n;
  }
  size.last = next == all && (!notice || (alone && room > size.n));
  size.notice = notice && size.last;
  return size;
}

}  // namespace xpyd::disagg::rdma

#include "disagg/transport/rdma_plan.h"

#include <algorithm>

namespace xpyd::disagg::rdma {
namespace {

bool inside(const MemoryRange& region, const std::byte* at, size_t bytes) {
  return at >= region.data() && at + bytes <= region.data() + region.size();
}

// The first of the regions that holds these bytes; their number: none does.
size_t region_of(std::span<const MemoryRange> regions, const std::byte* at, size_t bytes) {
  size_t i = 0;
  while (i < regions.size() && !inside(regions[i], at, bytes)) ++i;
  return i;
}

// Joins what lies at most `gap` bytes apart.
std::vector<Range> join(const std::vector<Range>& sorted, uint64_t gap) {
  std::vector<Range> joined;
  for (const Range& range : sorted) {
    if (!joined.empty() && joined.back().region == range.region && range.begin <= joined.back().end + gap)
      joined.back().end = std::max(joined.back().end, range.end);
    else
      joined.push_back(range);
  }
  return joined;
}

bool holds(const WindowKeys& window, uint32_t range, uint64_t remote) {
  return range < window.ranges.size() && remote >= window.ranges[range].begin &&
         remote - window.ranges[range].begin < window.ranges[range].bytes;
}

// Starts from the range that held the byte before. Their number: none holds this one.
uint32_t range_of(const WindowKeys& window, uint32_t before, uint64_t remote) {
  if (holds(window, before, remote)) return before;
  auto after = std::upper_bound(window.ranges.begin(), window.ranges.end(), remote,
                                [](uint64_t at, const WindowKeys::Range& r) { return at < r.begin; });
  const auto i = uint32_t(after - window.ranges.begin());
  return i > 0 && holds(window, i - 1, remote) ? i - 1 : uint32_t(window.ranges.size());
}

}  // namespace

Result<std::vector<Range>> cover(std::span<const MemoryRange> pieces, std::span<const MemoryRange> regions) {
  std::vector<Range> ranges;
  for (const MemoryRange& piece : pieces) {
    if (piece.empty()) continue;
    const size_t region = region_of(regions, piece.data(), piece.size());
    if (region == regions.size()) return invalid("window: a range is outside this instance's KV memory");
    const auto begin = reinterpret_cast<uint64_t>(piece.data());
    ranges.push_back({begin, begin + piece.size(), region});
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  ranges = join(ranges, 0);
  if (ranges.size() <= kMaxKeys) return ranges;
  std::vector<uint64_t> gaps;
  for (size_t i = 1; i < ranges.size(); ++i)
    if (ranges[i].region == ranges[i - 1].region) gaps.push_back(ranges[i].begin - ranges[i - 1].end);
  const size_t n = ranges.size() - kMaxKeys;
  if (n > gaps.size()) return invalid("window: more than 256 regions");
  std::nth_element(gaps.begin(), gaps.begin() + long(n) - 1, gaps.end());
  return join(ranges, gaps[n - 1]);
}

bool plan_requests(std::span<const Copy> copies, const WindowKeys& window, std::span<const MemoryRange> regions,
                   const RequestLimits& limits, Requests& planned) {
  const bool write = window.op == KvOp::write;
  planned.list.clear();
  planned.pieces.clear();
  planned.bytes = 0;
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
      range = range_of(window, range, remote);
      if (range == window.ranges.size()) return false;
      Request* request = planned.list.empty() ? nullptr : &planned.list.back();
      LocalPiece* piece = planned.pieces.empty() ? nullptr : &planned.pieces.back();
      // Neighbours in address, but of two registrations, are two pieces.
      const bool longer = piece && piece->address + piece->bytes == local && piece->region == uint32_t(region);
      if (!request || request->range != range || request->remote + request->bytes != remote ||
          request->bytes == limits.bytes || (request->n_pieces == limits.pieces && !longer)) {
        planned.list.push_back({remote, range, uint32_t(planned.pieces.size()), 0, 0});
        request = &planned.list.back();
      }
      const size_t in_range = window.ranges[range].bytes - (remote - window.ranges[range].begin);
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
  // Of a write the last request is what the owner counts; a write of nothing and a read, which
  // tells the owner nothing, are followed by a notice.
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

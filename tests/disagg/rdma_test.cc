// The rdma transport. Where there is a device, the suite (transport_test.cc) runs over it.
// Bytes from outside, and the errors without a device, are tested everywhere.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "base/random.h"
#include "disagg/transport/rdma/rdma.h"
#include "disagg/transport/rdma/rdma_verbs.h"
#include "disagg/transport/transports.h"
#include "tests/catch.h"
#include "tests/disagg/transport_side.h"

namespace xpyd::testing::rdma_test {

using namespace rdma;
using rdma::Request;

std::shared_ptr<std::byte> plain_memory(size_t bytes) { return cpu_device().allocate(bytes).value(); }

// Returns "" or why there is no transport over these NICs.
std::string error_of(const std::vector<std::string>& nics) {
  auto memory = plain_memory(1 << 20);
  RealClock clock;
  TransportOptions options{.regions = {{memory.get(), 1 << 20}}, .clock = &clock, .nics = nics};
  auto made = make_rdma_transport(options);
  return made ? "" : made.error().message;
}

// All devices that are up: two NIC ports in the virtual machine of `make check STAGE=rdma`.
const RegisterTransport rdma_row(
    {.name = "rdma", .make = make_rdma_transport, .memory = plain_memory, .needs_owner = false, .missing = [] {
       return error_of({});
     }});

TEST_CASE("rdma: an offer arrives whole or is refused", "[rdma]") {
  NicPortEnd end;
  end.mtu = 3, end.reads = 16, end.number = 0xabcdef, end.psn = 5, end.gid[3] = 9;
  const Offer offer{{end, end}, "no room"};
  const std::string whole = to_bytes(offer);
  const auto read = from_bytes<Offer>(whole);
  REQUIRE(read);
  REQUIRE(read.value().nic_ports.size() == 2);
  CHECK(read.value().nic_ports[1].number == 0xabcdef);
  CHECK(read.value().nic_ports[1].gid == end.gid);
  CHECK(read.value().refusal == "no room");
  for (size_t n = 0; n < whole.size(); ++n) CHECK(!from_bytes<Offer>(whole.substr(0, n)));
  CHECK(!from_bytes<Offer>(whole + "x"));
  Offer wrong = offer;
  wrong.nic_ports[0].mtu = 0;
  CHECK(!from_bytes<Offer>(to_bytes(wrong)));
  wrong = offer;
  wrong.nic_ports[0].number = 1u << 24;
  CHECK(!from_bytes<Offer>(to_bytes(wrong)));
}

TEST_CASE("rdma: any bytes are parsed or refused", "[rdma]") {
  Random random(11);
  NicPortEnd end;
  end.mtu = 3, end.reads = 16;
  const std::string sample = to_bytes(Offer{{end}, "x"});
  int parsed = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = sample;
    for (uint64_t n = random.below(4); n > 0; --n) bytes[random.below(bytes.size())] = char(random.below(256));
    if (i % 2) bytes.resize(random.below(2 * bytes.size()), char(random.below(256)));
    parsed += from_bytes<Offer>(bytes).ok();
    (void)parse_transport_address("rdma", bytes).ok();
  }
  CHECK(parsed > 0);
}

TEST_CASE("rdma: an absent port is named, and an absent device is reported", "[rdma]") {
  const std::string why = error_of({"no_such_card:1"});
  const bool here = std::filesystem::exists("/sys/class/infiniband") &&
                    !std::filesystem::is_empty("/sys/class/infiniband");
  INFO(why);
  CHECK(why.find(here ? "no_such_card:1" : "no RDMA device") != std::string::npos);
}

// Addresses alone. Nothing reads or writes this memory.
std::byte* at(uint64_t address) { return reinterpret_cast<std::byte*>(address); }
MemoryRange piece(uint64_t begin, uint64_t bytes) { return {at(begin), bytes}; }

constexpr uint64_t kHere = 1 << 20, kThere = 1 << 30;

TEST_CASE("rdma: a registration's ranges are its pieces, joined where they touch", "[rdma]") {
  const std::vector<MemoryRange> regions = {piece(kHere, 1000), piece(kHere + 1000, 1000)};
  const std::vector<MemoryRange> pieces = {piece(kHere + 50, 50), piece(kHere, 50),       piece(kHere + 90, 20),
                                           piece(kHere + 300, 0), piece(kHere + 990, 10), piece(kHere + 1000, 5)};
  auto covered = cover(pieces, regions);
  REQUIRE(covered);
  const std::vector<AddressRange>& ranges = covered.value();
  REQUIRE(ranges.size() == 3);  // the last two touch, but lie in two regions
  CHECK((ranges[0].begin == kHere && ranges[0].bytes == 110));
  CHECK((ranges[1].begin == kHere + 990 && ranges[1].bytes == 10));
  CHECK(ranges[2].begin == kHere + 1000);
  for (const MemoryRange& stray : {piece(kHere - 1, 2), piece(kHere + 1999, 2), piece(kHere + 999, 2)}) {
    auto refused = cover(std::span(&stray, 1), regions);
    REQUIRE(!refused);
    CHECK(refused.error().message.find("outside") != std::string::npos);
  }
}

TEST_CASE("rdma: a registration of many pieces has at most 256 keys, over the smallest gaps", "[rdma]") {
  Random random(3);
  const std::vector<MemoryRange> regions = {piece(kHere, 1 << 28)};
  for (size_t n : {255, 256, 257, 300, 1000}) {
    std::vector<MemoryRange> pieces;
    std::vector<uint64_t> gaps;
    uint64_t end = kHere;
    for (size_t i = 0; i < n; ++i) {
      const uint64_t gap = 1 + random.below(1000), bytes = 1 + random.below(1000);
      if (i > 0) gaps.push_back(gap);
      pieces.push_back(piece(end + gap, bytes));
      end += gap + bytes;
    }
    std::vector<MemoryRange> shuffled = pieces;
    for (size_t i = n; i > 1; --i) std::swap(shuffled[i - 1], shuffled[random.below(i)]);
    auto covered = cover(shuffled, regions);
    REQUIRE(covered);
    const std::vector<AddressRange>& ranges = covered.value();
    CHECK(ranges.size() <= kMaxKeys);
    if (n <= kMaxKeys) CHECK(ranges.size() == n);
    size_t r = 0;
    for (const MemoryRange& p : pieces) {
      const auto begin = reinterpret_cast<uint64_t>(p.data());
      while (r < ranges.size() && ranges[r].begin + ranges[r].bytes < begin + p.size()) ++r;
      REQUIRE(r < ranges.size());
      CHECK(ranges[r].begin <= begin);
    }
    // As many of the smallest gaps are bridged as necessary, and those equal to the largest of them.
    std::sort(gaps.begin(), gaps.end());
    const uint64_t most = n > kMaxKeys ? gaps[n - kMaxKeys - 1] : 0;
    size_t open = 0;
    for (uint64_t gap : gaps) open += gap > most;
    CHECK(ranges.size() == open + 1);
    for (size_t i = 1; i < ranges.size(); ++i)
      CHECK(ranges[i].begin - ranges[i - 1].begin - ranges[i - 1].bytes > most);
  }
  // Gaps between regions cannot be bridged.
  std::vector<MemoryRange> many;
  for (uint64_t i = 0; i < kMaxKeys + 1; ++i) many.push_back(piece(kHere + 100 * i, 100));
  CHECK(!cover(many, many));
}

// Returns the local address of each remote byte, as the requests move it, and checks their limits.
std::map<uint64_t, uint64_t> moved(const Requests& planned, std::span<const AddressRange> ranges,
                                   std::span<const MemoryRange> regions, const RequestLimits& limits) {
  std::map<uint64_t, uint64_t> bytes;
  size_t next_piece = 0, total = 0;
  for (const Request& request : planned.list) {
    REQUIRE(request.range < ranges.size());
    const AddressRange& range = ranges[request.range];
    CHECK((request.remote >= range.begin && request.remote + request.bytes <= range.begin + range.bytes));
    CHECK((request.bytes > 0 && request.bytes <= limits.bytes));
    CHECK((request.n_pieces > 0 && request.n_pieces <= limits.pieces));
    CHECK(request.first_piece == next_piece);
    uint64_t remote = request.remote;
    for (uint32_t i = 0; i < request.n_pieces; ++i) {
      const LocalPiece& local = planned.pieces[next_piece++];
      REQUIRE(local.region < regions.size());
      const auto base = reinterpret_cast<uint64_t>(regions[local.region].data());
      CHECK((local.address >= base && local.address + local.bytes <= base + regions[local.region].size()));
      for (uint32_t b = 0; b < local.bytes; ++b) bytes[remote++] = local.address + b;
    }
    CHECK(remote == request.remote + request.bytes);
    total += request.bytes;
  }
  CHECK(next_piece == planned.pieces.size());
  CHECK(total == planned.bytes);
  CHECK(total == bytes.size());  // no byte twice
  return bytes;
}

TEST_CASE("rdma: requests move every byte of the copies and no other", "[rdma]") {
  Random random(5);
  const std::vector<MemoryRange> regions = {piece(kHere, 4096), piece(kHere + 4096, 4096)};
  for (int round = 0; round < 300; ++round) {
    const KvOp op = random.below(2) ? KvOp::write : KvOp::read;
    // Ranges that touch have keys of their own all the same.
    std::vector<AddressRange> ranges;
    for (uint64_t at = kThere; ranges.size() < 8;) {
      const uint64_t bytes = 1 + random.below(600);
      ranges.push_back({at, bytes});
      at += bytes + (random.below(2) ? 0 : random.below(50));
    }
    const RequestLimits limits{1 + random.below(700), uint32_t(1 + random.below(5))};
    std::vector<Copy> copies;
    std::map<uint64_t, uint64_t> expected;
    uint64_t local = kHere;
    for (const AddressRange& range : ranges) {
      for (uint64_t from = 0; from < range.bytes;) {
        const uint64_t bytes = std::min(random.below(200), range.bytes - from);
        if (random.below(3) == 0) local += random.below(40);
        // A piece lies in one region, as the memory of every rank does.
        if (local < kHere + 4096 && local + bytes > kHere + 4096) local = kHere + 4096;
        if (random.below(5) != 0) {
          std::byte *here = at(local), *there = at(range.begin + from);
          copies.push_back(op == KvOp::write ? Copy{here, there, bytes} : Copy{there, here, bytes});
          for (uint64_t b = 0; b < bytes; ++b) expected[range.begin + from + b] = local + b;
          local += bytes;
        }
        from += bytes;
      }
    }
    if (local > kHere + 8192) continue;
    Requests planned;
    REQUIRE(plan_requests(copies, op, ranges, regions, limits, planned));
    CHECK(moved(planned, ranges, regions, limits) == expected);
  }
}

TEST_CASE("rdma: neighbours become one request, and a copy may cross ranges", "[rdma]") {
  const std::vector<MemoryRange> regions = {piece(kHere, 1 << 20), piece(kHere + (1 << 20), 4096)};
  const AddressRange ranges[] = {{kThere, 1000}, {kThere + 1000, 1000}};
  const RequestLimits limits{1 << 20, 16};
  Requests planned;
  auto plan = [&](std::vector<Copy> copies) {
    return plan_requests(copies, KvOp::write, ranges, regions, limits, planned);
  };
  // Two blocks that are neighbours there and apart here are one request of two pieces.
  REQUIRE(plan({{at(kHere), at(kThere), 100}, {at(kHere + 500), at(kThere + 100), 100}}));
  CHECK((planned.list.size() == 1 && planned.pieces.size() == 2 && planned.bytes == 200));
  // Neighbours on both sides are one piece.
  REQUIRE(plan({{at(kHere), at(kThere), 100}, {at(kHere + 100), at(kThere + 100), 100}}));
  CHECK((planned.list.size() == 1 && planned.pieces.size() == 1));
  // Neighbours in two regions are two pieces.
  const uint64_t border = kHere + (1 << 20);
  REQUIRE(plan({{at(border - 100), at(kThere), 100}, {at(border), at(kThere + 100), 100}}));
  CHECK((planned.list.size() == 1 && planned.pieces.size() == 2));
  CHECK(planned.pieces[1].region == 1);
  REQUIRE(plan({{at(kHere), at(kThere + 900), 200}}));
  CHECK((planned.list.size() == 2 && planned.list[1].remote == kThere + 1000));
  REQUIRE(plan({}));
  CHECK((planned.list.empty() && planned.bytes == 0));
  for (Copy stray : {Copy{at(kHere), at(kThere - 1), 1}, Copy{at(kHere), at(kThere + 2000), 1},
                     Copy{at(kHere), at(kThere + 1999), 2}, Copy{at(kHere), at(5), 1}})
    CHECK(!plan({stray}));
}

// Batches of a transfer until all of it is sent. The queue's room is drawn at random.
TEST_CASE("rdma: batches carry every request once, and the notice last and alone", "[rdma]") {
  Random random(7);
  for (int round = 0; round < 2000; ++round) {
    const KvOp op = random.below(2) ? KvOp::write : KvOp::read;
    Requests planned;
    for (uint64_t n = random.below(4) ? random.below(200) : random.below(3); n > 0; --n)
      planned.list.push_back({0, 0, 0, 1, uint32_t(1 + random.below(1 << random.below(21)))});
    const bool notice = op == KvOp::read || planned.list.empty();
    size_t next = 0;
    bool out = false;
    for (int tries = 0; !out; ++tries) {
      REQUIRE(tries < 10000);
      const int room = int(random.below(70));
      const bool alone = random.below(3) != 0;
      const BatchSize size = next_batch(planned, op, next, room, alone);
      REQUIRE((size.n >= 0 && size.n <= kBatchRequests && size.n + int(size.notice) <= room));
      size_t bytes = 0;
      for (int i = 0; i + 1 < size.n; ++i) bytes += planned.list[next + size_t(i)].bytes;
      CHECK(bytes < kBatchBytes);  // without the last one
      next += size_t(size.n);
      REQUIRE(next <= planned.list.size());
      CHECK(size.last == (next == planned.list.size() && (!notice || size.notice)));
      CHECK((!size.notice || notice));
      if (size.last) CHECK(alone);  // what the owner counts overtakes nothing on other NIC ports
      // With room here and nothing on other NIC ports, the transfer goes on.
      if (alone && room > 1) CHECK((size.n > 0 || size.notice));
      out = size.last;
    }
  }
}

}  // namespace xpyd::testing::rdma_test

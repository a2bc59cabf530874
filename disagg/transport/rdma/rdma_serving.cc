#include "disagg/transport/rdma/rdma_serving.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "disagg/transport/registration_table.h"

namespace xpyd::disagg::rdma {
namespace {

// The low byte of a memory window's key changes with each bind and repeats after 255 of them; a use takes two. Spare
// memory windows are used oldest first, and only from this number on. An old key could therefore fit again only after
// 128 * 127 further ranges were opened, without its peer hearing of any.
constexpr size_t kSpare = 128;
constexpr double kBindSeconds = 2;  // a NIC needs microseconds; software devices may wait for the processor

Error no_keys(const std::string& why) { return {ErrorCode::unavailable, "rdma: " + why}; }

}  // namespace

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

Result<RemoteKey> Serving::open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) {
  auto covered = cover(ranges, regions_);
  if (!covered) return covered.error();
  std::lock_guard lock(mutex_);
  if (last_generation_ == UINT32_MAX) return no_keys("all generations of registrations are used up");
  Registration made;
  made.key = {0, ++last_generation_, permit(peer, op), std::move(covered).value(), {}};
  for (size_t i = 0; i < made.key.ranges.size() * nic_ports_.size(); ++i) {
    auto one = window(i % nic_ports_.size());
    if (!one) return one.error();
    made.windows.push_back(std::move(one).value());
  }
  if (!bind(made, op == KvOp::write ? IBV_ACCESS_REMOTE_WRITE : IBV_ACCESS_REMOTE_READ))
    return no_keys("the card does not bind memory windows");
  for (const MemoryWindow& bound : made.windows) made.key.rkeys.push_back(bound->rkey);
  return registrations_.emplace(last_generation_, std::move(made)).first->second.key;
}

bool Serving::close(const RemoteKey& key) {
  std::lock_guard lock(mutex_);
  auto it = registrations_.find(key.generation);
  if (it == registrations_.end()) return true;
  std::vector<MemoryWindow>& windows = it->second.windows;
  if (bind(it->second, 0))
    for (size_t i = 0; i < windows.size(); ++i) spare_[i % nic_ports_.size()].push_back(std::move(windows[i]));
  registrations_.erase(it);
  return true;
}

int Serving::arrived(const RemoteKey& key) {
  std::lock_guard lock(mutex_);
  poll();
  auto it = registrations_.find(key.generation);
  return it == registrations_.end() ? 0 : it->second.arrived;
}

Result<MemoryWindow> Serving::window(size_t nic_port) {
  std::deque<MemoryWindow>& spare = spare_[nic_port];
  if (spare.size() < kSpare) {
    MemoryWindow made(ibv_alloc_mw(nic_ports_[nic_port].protection.get(), IBV_MW_TYPE_1));
    if (made) return made;
    return no_keys(nic_ports_[nic_port].name + " has no more memory windows: " + std::strerror(errno));
  }
  MemoryWindow oldest = std::move(spare.front());
  spare.pop_front();
  return oldest;
}

// Binds the windows of a registration to its ranges, or to nothing if no access is allowed. Waits for the cards.
bool Serving::bind(const Registration& registration, unsigned access) {
  RealClock clock;
  const double until = clock.now() + kBindSeconds;
  const auto& [key, windows, arrived] = registration;
  for (size_t i = 0; i < windows.size() && answers_; ++i) {
    NicPort& nic_port = nic_ports_[i % nic_ports_.size()];
    const AddressRange& range = key.ranges[i / nic_ports_.size()];
    const size_t region = region_of(regions_, reinterpret_cast<std::byte*>(range.begin), range.bytes);
    ibv_mw_bind to{};
    to.send_flags = i + nic_ports_.size() < windows.size() ? 0 : IBV_SEND_SIGNALED;
    to.bind_info = {nic_port.regions[region].get(), range.begin, access == 0 ? 0 : range.bytes, access};
    answers_ = ibv_bind_mw(nic_port.binder.pair.get(), windows[i].get(), &to) == 0;
  }
  for (size_t i = 0; i < nic_ports_.size() && !windows.empty() && answers_; ++i) {
    ibv_wc done{};
    int n = 0;
    while (n == 0 && clock.now() < until) n = ibv_poll_cq(nic_ports_[i].binder.completions.get(), 1, &done);
    answers_ = n == 1 && done.status == IBV_WC_SUCCESS;
  }
  return answers_;
}

bool Serving::join(PeerId peer, const ChannelPtr& channel, const Offer& offer) {
  Client client{channel, {}};
  Offer answer;
  auto made = make_queues(nic_ports_, std::min(nic_ports_.size(), offer.nic_ports.size()));
  if (made) client.queues = std::move(made).value();
  const Status joined = made ? connect_queues(nic_ports_, client.queues, offer.nic_ports) : Status(made.error());
  if (joined)
    answer.nic_ports = ends_of(client.queues);
  else
    answer.refusal = joined.error().message;
  if (joined) {
    leave(peer, nullptr);
    std::lock_guard lock(mutex_);
    clients_[peer] = std::move(client);
  }
  say(channel, answer);
  return joined.ok();
}

void Serving::leave(PeerId peer, const Channel* channel) {
  std::lock_guard lock(mutex_);
  auto it = clients_.find(peer);
  if (it == clients_.end() || (channel && it->second.channel.get() != channel)) return;
  poll();  // a queue pair takes its arrivals with it
  it->second.channel->close("the peer was disconnected or has connected again");
  clients_.erase(it);
}

// Counts the transfers that have ended here.
void Serving::poll() {
  for (NicPort& nic_port : nic_ports_)
    for (ibv_wc arrival; ibv_poll_cq(nic_port.arrivals.get(), 1, &arrival) == 1;) {
      XPYD_CHECK(post_receive(nic_port) == 0);
      auto it = registrations_.find(ntohl(arrival.imm_data));
      if (arrival.status == IBV_WC_SUCCESS && it != registrations_.end()) ++it->second.arrived;
    }
}

}  // namespace xpyd::disagg::rdma

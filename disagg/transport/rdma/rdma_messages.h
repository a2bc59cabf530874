// The messages between the two ends of an rdma link, over the bootstrap's TCP channel. They come from another process,
// so the readers check counts, lengths and values, and refuse a message that is not exactly right.
//
// Thread safety: plain values and functions.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "disagg/transport/bootstrap.h"
#include "disagg/transport/transport.h"

namespace xpyd::disagg::rdma {

constexpr size_t kMaxNicPorts = 16;  // NIC ports of one link
constexpr size_t kMaxKeys = 256;     // ranges of one registration
constexpr size_t kMaxMessageBytes = 1024 + kMaxKeys * (20 + 4 * kMaxNicPorts);

// One end of a queue pair.
struct NicPortEnd {
  std::array<uint8_t, 16> gid{};
  uint16_t lid = 0;
  uint8_t mtu = 0;               // ibv_mtu
  uint8_t reads = 0;             // most RDMA READs in flight, in each direction
  uint32_t number = 0, psn = 0;  // 24 bits
};
template <class A>
void fields(A& a, typename A::template Ref<NicPortEnd> s) {
  constexpr int k24Bits = (1 << 24) - 1;
  auto& [gid, lid, mtu, reads, number, psn] = s;
  a.bytes("gid", gid);
  XPYD_EACH(a, lid);
  a.number("mtu", mtu, 1, 5);
  a.number("reads", reads, 1, 255);
  a.number("number", number, 0, k24Bits);
  a.number("psn", psn, 0, k24Bits);
}

// The first frame in each direction: the initiator offers its queue pairs, and the owner answers with its own. An
// answer without queue pairs is a refusal, and `refusal` gives the reason.
struct Offer {
  std::vector<NicPortEnd> nic_ports;
  std::string refusal;
};
template <class A>
void fields(A& a, typename A::template Ref<Offer> s) {
  auto& [nic_ports, refusal] = s;
  a.list("rails", nic_ports, kMaxNicPorts);
  XPYD_EACH(a, refusal);
}

// The remote keys of an open registration: one for each range and NIC port.
struct RegistrationKeys {
  uint32_t index = 0, generation = 0;
  KvOp op = KvOp::write;
  std::vector<AddressRange> ranges;  // sorted by begin, disjoint
  std::vector<uint32_t> keys;        // [ranges][NIC ports of the link]
  uint32_t key(size_t range, size_t nic_port) const { return keys[range * (keys.size() / ranges.size()) + nic_port]; }
};
template <class A>
void fields(A& a, typename A::template Ref<RegistrationKeys> s) {
  auto& [index, generation, op, ranges, keys] = s;
  XPYD_EACH(a, index, generation, op);
  a.list("ranges", ranges, kMaxKeys);
  a.numbers("keys", keys, kMaxKeys * kMaxNicPorts);
}

// A message on a link that is up. The initiator sends sync, refused and renew; the owner sends the others.
struct Message {
  enum Kind : uint8_t {
    opened,   // a registration and its keys; sent again with other keys after a renewal of the link
    closed,   // index and generation of a registration that closes
    sync,     // the owner answers with synced, behind all that it has sent before
    refused,  // as sync, after a refused transfer
    synced,
    renew,    // the initiator's new queue pairs after a failure; number is 1 if the owner's NIC refused an access
    renewed,  // the owner's new queue pairs; empty if it cannot make them
  };
  Kind kind = sync;
  RegistrationKeys registration;
  uint64_t number = 0;
  std::vector<NicPortEnd> nic_ports;
};

template <class A>
void fields(A& a, typename A::template Ref<Message> s) {
  auto& [kind, registration, number, nic_ports] = s;
  a.choice("kind", kind, Message::renewed);
  XPYD_EACH(a, registration, number);
  a.list("rails", nic_ports, kMaxNicPorts);
}

// Reads a message and checks what must hold between its fields. `n_nic_ports` are the NIC ports of the link.
inline Result<Message> read_message(std::string_view bytes, size_t n_nic_ports) {
  Result<Message> message = from_bytes<Message>(bytes);
  if (!message) return message;
  const auto& [kind, registration, number, nic_ports] = message.value();
  if (kind > Message::closed) return message;
  if (registration.generation == 0) return invalid("generation: expected at least 1");
  if (kind == Message::closed && !registration.ranges.empty())
    return invalid("ranges: expected none for a closed registration");
  uint64_t end = 0;
  if (registration.keys.size() != registration.ranges.size() * n_nic_ports)
    return invalid("keys: expected one for each range and NIC port");
  for (const AddressRange& range : registration.ranges) {
    if (range.begin < end || range.bytes == 0 || range.bytes > UINT64_MAX - range.begin)
      return invalid("ranges: expected sorted, disjoint and within the address space");
    end = range.begin + range.bytes;
  }
  return message;
}

}  // namespace xpyd::disagg::rdma

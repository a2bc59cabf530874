// Who is there, for every socket of the cluster: four short messages before the first frame, each
// { u16 length, bytes }.
//
//   initiator -> acceptor   hello: magic, version, nonce, role, fingerprint, schema, node id
//   acceptor -> initiator   hello: the same of its own
//   initiator -> acceptor   HMAC(key, "xpyd initiator" | both hellos)
//   acceptor -> initiator   HMAC(key, "xpyd acceptor"  | both hellos)
//
// Both sides prove the key over fresh nonces of both, so an old session cannot be played again, a
// proof cannot be sent back to whom it came from, and roles and ids cannot be exchanged. The
// initiator proves first: whoever merely finds the port learns nothing made with the key. Each
// direction's frame key is HMAC(key, label | both hellos).
//
// The key is the cluster's secret, or the token in the address of a wire's owner. HMAC-SHA256 (RFC 2104, FIPS 180-4) is
// libnettle's.
//
// Thread safety: a Handshake belongs to one thread; the rest are plain functions and values.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/siphash.h"
#include "base/status.h"

namespace xpyd::disagg {

using Sha256 = std::array<uint8_t, 32>;

Sha256 hmac_sha256(std::string_view key, std::string_view message);

// In a time that does not depend on where they differ.
bool equal_in_constant_time(const Sha256& a, const Sha256& b);

// From the kernel's generator.
void fill_random(void* bytes, size_t n);
inline uint64_t random_secret() {
  uint64_t value;
  fill_random(&value, sizeof value);
  return value;
}

inline constexpr size_t kMinClusterKeyBytes = 16;
inline constexpr size_t kMaxClusterKeyBytes = 4096;

// Whoever holds the same key is a member of the cluster.
class ClusterKey {
 public:
  // No secret: channels still check who they speak to and what version, but any local user could
  // be a member. Refused beyond this host (channel.h).
  ClusterKey() = default;
  // The file's bytes without line ends at its end, 16 to 4,096 of them. A file that others than its
  // owner and group may open, or that its group may write, is refused.
  static Result<ClusterKey> from_file(const std::string& path);
  // For workers that this process forks, and tests.
  static ClusterKey random();
  // A secret that both sides have been told another way.
  static ClusterKey of(std::string bytes);

  bool secret() const { return !bytes_.empty(); }
  std::string_view bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

inline constexpr uint16_t kControlVersion = 1;      // of handshake, frames and codec together
inline constexpr size_t kMaxHandshakeBytes = 1024;  // that a peer may send before it is known
inline constexpr size_t kMaxNodeIdBytes = 64;

enum class NodeRole : uint8_t { conductor, prefill, decode, colocated, tool, wire };  // wire: of an instance
const char* name_of(NodeRole role);

struct NodeIdentity {
  NodeRole role = NodeRole::tool;
  std::string id;  // printable ASCII without blanks, 1 to 64 bytes
  // Of what must agree before KV may cross (model, dtypes, layout); of a wire, its session. Carried and authenticated;
  // the owner of the channel compares.
  uint64_t fingerprint = 0;
  // Of the messages (codec_schema()): the same on both sides, or the handshake refuses.
  uint64_t schema = 0;
};
Status check_identity(const NodeIdentity& identity);

class Handshake {
 public:
  enum class Side { initiator, acceptor };
  Handshake(Side side, const ClusterKey& key, const NodeIdentity& self);

  // Takes bytes from the peer and appends to `out` what to send to it (call once without bytes to begin). Uses only
  // bytes of the handshake; what follows it stays in `bytes`. After an error the connection must be closed.
  Status feed(std::string_view& bytes, std::string& out);
  bool done() const { return step_ == Step::done; }
  // The hellos are exchanged: an acceptor that closes now has not liked our proof.
  bool proving() const { return step_ == Step::proof; }

  // When done:
  const NodeIdentity& peer() const { return peer_; }
  SipKey send_key() const { return send_key_; }
  SipKey receive_key() const { return receive_key_; }

 private:
  enum class Step { hello, proof, done };
  Status take(std::string_view message, std::string& out);
  Status take_hello(std::string_view message);
  Sha256 proof(Side side) const;
  SipKey frame_key(Side from) const;
  std::string transcript(std::string_view label) const;
  void say(std::string_view message, std::string& out);

  Side side_;
  ClusterKey key_;
  uint64_t schema_;
  std::string own_hello_, peer_hello_;
  NodeIdentity peer_;
  SipKey send_key_, receive_key_;
  bool begun_ = false;
  Step step_ = Step::hello;
  std::string buffer_;
  size_t received_ = 0;
};

}  // namespace xpyd::disagg

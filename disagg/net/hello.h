// The handshake of every socket of the cluster: four short messages before the first frame, each { u16 length, bytes }.
//
//   initiator -> acceptor   hello: magic, version, nonce, fingerprint, node id
//   acceptor -> initiator   hello: the same of its own
//   initiator -> acceptor   HMAC(key, "xpyd initiator" | both hellos)
//   acceptor -> initiator   HMAC(key, "xpyd acceptor"  | both hellos)
//
// Both sides prove the key over both nonces. An old session can therefore not be replayed, a proof cannot be sent back
// to its maker, and ids cannot be swapped. The initiator proves first, so a port scanner learns nothing that
// was made with the key. Each direction's frame key is HMAC(key, label | both hellos).
//
// The key is the cluster's secret, or the token in a transport's address. HMAC-SHA256 (RFC 2104, FIPS
// 180-4) comes from libnettle.
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

// The time does not depend on the position of a difference.
bool equal_in_constant_time(const Sha256& a, const Sha256& b);

// Random bytes from the kernel.
void fill_random(void* bytes, size_t n);
inline uint64_t random_secret() {
  uint64_t value;
  fill_random(&value, sizeof value);
  return value;
}

inline constexpr size_t kMinClusterKeyBytes = 16;
inline constexpr size_t kMaxClusterKeyBytes = 4096;

// The secret of a cluster. Every holder of the key is a member.
class ClusterKey {
 public:
  // No secret: channels still check versions and fingerprints, but any local user can be a member. Addresses beyond this
  // host are refused (channel.h).
  ClusterKey() = default;
  // Reads a key of 16 to 4,096 bytes, without trailing line ends. A file that is readable beyond owner and group, or
  // writable beyond the owner, is refused.
  static Result<ClusterKey> from_file(const std::string& path);
  // A random key, for workers that this process forks and for tests.
  static ClusterKey random();
  // A secret that both sides have by other means.
  static ClusterKey of(std::string bytes);

  bool secret() const { return !bytes_.empty(); }
  std::string_view bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

inline constexpr uint16_t kControlVersion = 1;      // of handshake, frames and codec together
inline constexpr size_t kMaxHandshakeBytes = 1024;  // accepted from an unknown peer
inline constexpr size_t kMaxNodeIdBytes = 64;

struct NodeIdentity {
  std::string id;  // printable ASCII without blanks, 1 to 64 bytes
  // A hash of version, commit, model, context, transport and dtypes, or the session of a transport. It is
  // authenticated, and the owner of the channel compares it. Equal commits have equal messages.
  uint64_t fingerprint = 0;
};
Status check_identity(const NodeIdentity& identity);

class Handshake {
 public:
  enum class Side { initiator, acceptor };
  Handshake(Side side, const ClusterKey& key, const NodeIdentity& self);

  // Takes bytes from the peer, and appends the answer to `out`. The first call has no bytes. It consumes only bytes of
  // the handshake and leaves the rest in `bytes`. After an error the connection must be closed.
  Status feed(std::string_view& bytes, std::string& out);
  bool done() const { return step_ == Step::done; }
  // The hellos have been exchanged. If an acceptor closes now, it has rejected our proof.
  bool proving() const { return step_ == Step::proof; }

  // Valid when done:
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
  std::string own_hello_, peer_hello_;
  NodeIdentity peer_;
  SipKey send_key_, receive_key_;
  bool begun_ = false;
  Step step_ = Step::hello;
  std::string buffer_;
  size_t received_ = 0;
};

}  // namespace xpyd::disagg

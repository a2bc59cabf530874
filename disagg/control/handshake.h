// Who is there: four short messages before the first frame, each { u16 length, bytes }.
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
// Thread safety: belongs to one thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/siphash.h"
#include "base/status.h"
#include "disagg/control/hmac.h"

namespace xpyd {

inline constexpr uint16_t kControlVersion = 1;      // of handshake, frames and codec together
inline constexpr size_t kMaxHandshakeBytes = 1024;  // that a peer may send before it is known
inline constexpr size_t kMaxNodeIdBytes = 64;

enum class NodeRole : uint8_t { conductor, prefill, decode, colocated, tool };
const char* name_of(NodeRole role);

struct NodeIdentity {
  NodeRole role = NodeRole::tool;
  std::string id;  // printable ASCII without blanks, 1 to 64 bytes
  // Of what must agree before KV may cross (model, dtypes, layout). Carried and authenticated; the
  // owner of the channel compares.
  uint64_t fingerprint = 0;
  // Of the messages (codec_schema()): the same on both sides, or the handshake refuses.
  uint64_t schema = 0;
};
Status check_identity(const NodeIdentity& identity);

class Handshake {
 public:
  enum class Side { initiator, acceptor };
  Handshake(Side side, const ClusterKey& key, const NodeIdentity& self);

  // Takes bytes from the peer and appends to `out` what to send to it (call once without bytes to
  // begin). Uses only bytes of the handshake; what follows it stays in `bytes`. After an error the
  // connection must be closed.
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

}  // namespace xpyd

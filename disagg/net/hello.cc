#include "disagg/net/hello.h"

#include <nettle/hmac.h>
#include <nettle/memops.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "base/status.h"
#include "disagg/net/bytes.h"

namespace xpyd::disagg {
namespace {

constexpr std::string_view kHelloMagic = "xpydctl\n";
constexpr size_t kNonceBytes = 32;
constexpr size_t kMaxMessageBytes = 256;  // a hello has at most 118 bytes

Error refuse(const std::string& why) { return {ErrorCode::io, "handshake: " + why}; }

}  // namespace

// ---- keys

Sha256 hmac_sha256(std::string_view key, std::string_view message) {
  auto bytes = [](std::string_view text) { return reinterpret_cast<const uint8_t*>(text.data()); };
  Sha256 digest;
  hmac_sha256_ctx context;
  hmac_sha256_set_key(&context, key.size(), bytes(key));
  hmac_sha256_update(&context, message.size(), bytes(message));
  hmac_sha256_digest(&context, digest.size(), digest.data());
  return digest;
}

bool equal_in_constant_time(const Sha256& a, const Sha256& b) { return memeql_sec(a.data(), b.data(), a.size()) == 1; }

void fill_random(void* bytes, size_t n) {  // the kernel gives up to 256 bytes whole
  XPYD_CHECK(getrandom(bytes, n, 0) == ssize_t(n), std::strerror(errno));
}

ClusterKey ClusterKey::of(std::string bytes) {
  ClusterKey key;
  key.bytes_ = std::move(bytes);
  return key;
}

ClusterKey ClusterKey::random() {
  ClusterKey key;
  key.bytes_.resize(32);
  fill_random(key.bytes_.data(), key.bytes_.size());
  return key;
}

Result<ClusterKey> ClusterKey::from_file(const std::string& path) {
  auto bad = [&](const std::string& why) { return invalid("cluster key file " + path + ": " + why); };
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return bad(std::strerror(errno));
  if (!S_ISREG(info.st_mode)) return bad("this is not a regular file");
  if (info.st_mode & (S_IRWXO | S_IWGRP)) {
    char mode[8];
    std::snprintf(mode, sizeof mode, "%04o", unsigned(info.st_mode & 07777));
    return bad(std::string("its mode is ") + mode + ", so other users may read or change it; expected 0600 or 0640");
  }
  if (info.st_size > off_t(kMaxClusterKeyBytes)) return bad("it has more than 4096 bytes");
  std::ifstream file(path, std::ios::binary);
  if (!file) return bad("it cannot be read");
  ClusterKey key = of(std::string(std::istreambuf_iterator<char>(file), {}));
  const size_t n = key.bytes_.find_last_not_of("\r\n") + 1;
  key.bytes_.resize(n);
  if (n < kMinClusterKeyBytes)
    return bad(std::to_string(n) + " bytes; expected at least " + std::to_string(kMinClusterKeyBytes) +
               " (head -c 32 /dev/urandom | base64 >FILE makes a good one)");
  return key;
}

// ---- the handshake

Status check_identity(const NodeIdentity& identity) {
  if (identity.id.empty() || identity.id.size() > kMaxNodeIdBytes)
    return invalid("node id: " + std::to_string(identity.id.size()) + " bytes; expected 1 to " +
                   std::to_string(kMaxNodeIdBytes));
  for (char c : identity.id)
    if (c <= ' ' || c > '~') return invalid("node id: expected printable ASCII without blanks");
  return ok();
}

Handshake::Handshake(Side side, const ClusterKey& key, const NodeIdentity& self) : side_(side), key_(key) {
  Status valid = check_identity(self);
  XPYD_CHECK(valid.ok(), valid.error().message);
  char nonce[kNonceBytes];
  fill_random(nonce, sizeof nonce);
  ByteWriter hello;
  hello.raw(kHelloMagic);
  hello.number(kControlVersion);
  hello.raw({nonce, sizeof nonce});
  hello.number(self.fingerprint);
  hello.text(self.id);
  own_hello_ = hello.take();
}

void Handshake::say(std::string_view message, std::string& out) {
  uint16_t length = uint16_t(message.size());
  out.append(reinterpret_cast<const char*>(&length), sizeof length);
  out.append(message);
}

Status Handshake::feed(std::string_view& bytes, std::string& out) {
  if (!begun_) {
    begun_ = true;
    if (side_ == Side::initiator) say(own_hello_, out);
  }
  // No byte behind the handshake is consumed, because it may belong to the first frame.
  while (!done() && !bytes.empty()) {
    uint16_t length = 0;
    if (buffer_.size() >= sizeof length) std::memcpy(&length, buffer_.data(), sizeof length);
    size_t want = buffer_.size() < sizeof length ? sizeof length - buffer_.size()
                                                 : sizeof length + length - buffer_.size();
    size_t n = std::min(want, bytes.size());
    received_ += n;
    if (received_ > kMaxHandshakeBytes) return refuse("it is longer than 1024 bytes");
    buffer_.append(bytes.substr(0, n));
    bytes.remove_prefix(n);
    if (buffer_.size() < sizeof length) continue;
    std::memcpy(&length, buffer_.data(), sizeof length);
    // Bytes of another protocol read as a length. An error is better than waiting for them.
    if (length == 0 || length > kMaxMessageBytes)
      return refuse("a message of " + std::to_string(length) + " bytes; the peer does not speak this protocol");
    if (buffer_.size() < sizeof length + length) continue;
    std::string message = buffer_.substr(sizeof length);
    buffer_.clear();
    if (Status status = take(message, out); !status) return status;
  }
  return ok();
}

Status Handshake::take(std::string_view message, std::string& out) {
  const Side other = side_ == Side::initiator ? Side::acceptor : Side::initiator;
  auto send_proof = [&] {
    Sha256 digest = proof(side_);
    say({reinterpret_cast<const char*>(digest.data()), digest.size()}, out);
  };
  if (step_ == Step::hello) {
    if (Status status = take_hello(message); !status) return status;
    if (side_ == Side::acceptor)
      say(own_hello_, out);
    else
      send_proof();
    step_ = Step::proof;
    return ok();
  }
  Sha256 theirs;
  if (message.size() != theirs.size()) return refuse("the proof has the wrong size");
  std::memcpy(theirs.data(), message.data(), theirs.size());
  if (!equal_in_constant_time(theirs, proof(other))) return refuse("the peer has a different cluster key");
  if (side_ == Side::acceptor) send_proof();
  send_key_ = frame_key(side_);
  receive_key_ = frame_key(other);
  step_ = Step::done;
  return ok();
}

Status Handshake::take_hello(std::string_view message) {
  ByteReader reader(message);
  if (reader.raw("magic", kHelloMagic.size()) != kHelloMagic) return refuse("the peer does not speak this protocol");
  auto version = reader.number<uint16_t>("version");
  if (!reader.failed() && version != kControlVersion)
    return refuse("the peer speaks version " + std::to_string(version) + ", but this is version " +
                  std::to_string(kControlVersion));
  reader.raw("nonce", kNonceBytes);
  peer_.fingerprint = reader.number<uint64_t>("fingerprint");
  peer_.id = reader.text("node id", kMaxNodeIdBytes);
  if (Status status = reader.finish(); !status) return refuse(status.error().message);
  if (Status status = check_identity(peer_); !status) return refuse(status.error().message);
  peer_hello_ = message;
  return ok();
}

// Each part follows its length, so two different transcripts never have equal bytes.
std::string Handshake::transcript(std::string_view label) const {
  const bool initiator = side_ == Side::initiator;
  ByteWriter writer;
  writer.text(label);
  writer.text(initiator ? own_hello_ : peer_hello_);
  writer.text(initiator ? peer_hello_ : own_hello_);
  return writer.take();
}

Sha256 Handshake::proof(Side side) const {
  return hmac_sha256(key_.bytes(), transcript(side == Side::initiator ? "xpyd initiator" : "xpyd acceptor"));
}

SipKey Handshake::frame_key(Side from) const {
  Sha256 digest = hmac_sha256(key_.bytes(), transcript(from == Side::initiator ? "xpyd frames of the initiator"
                                                                               : "xpyd frames of the acceptor"));
  SipKey key;
  std::memcpy(&key.k0, digest.data(), 8);
  std::memcpy(&key.k1, digest.data() + 8, 8);
  return key;
}

}  // namespace xpyd::disagg

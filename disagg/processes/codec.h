// Codec of control messages: every struct of disagg/messages.h as bytes, field by field (codec_fields.h).
//
// The clocks of two processes have different origins, so a time travels as its age. The receiver's time is late by the
// transmission. 0 means "none" and stays 0.
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "disagg/messages.h"
#include "disagg/processes/ranges.h"

namespace xpyd::disagg {

struct ClusterOptions;

// Returns the limits of the model and context that all members of a cluster share.
Limits limits(const ClusterOptions& options);

// Returns the type of the frame that carries `message`.
uint16_t frame_type(const Message& message);

// Encodes a frame's payload: receiver, sender, message. `now` is the Clock of this process in seconds.
std::string encode(InstanceId from, InstanceId to, const Message& message, double now);

// A Door says what a process accepts on one channel: the direction of messages, and the ranges of their numbers. Only
// the channel of the conductor carries the conductor's messages.
enum Way : uint8_t { kToInstance, kToConductor, kBetweenInstances, kAnyWay };
struct Door {
  Way way = kAnyWay;
  Limits limits = {};
};

// Decodes any bytes. Returns a message that this door accepts, in which every count, enumerator, token id and text is
// in its range and the fields fit each other, or an error that names message and field.
Result<Envelope> decode(uint16_t type, std::string_view payload, double now, const Door& door = {});

// Returns a hash of all messages' fields. It is in the handshake, so that builds with different messages refuse each
// other.
uint64_t codec_schema();

}  // namespace xpyd::disagg

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

namespace xpyd::disagg {

// Returns the type of the frame that carries `message`.
uint16_t frame_type(const Message& message);

// Encodes a frame's payload: receiver, sender, message. `now` is the Clock of this process in seconds.
std::string encode(InstanceId from, InstanceId to, const Message& message, double now);

// For the conductor, which passes messages on between instances: the receiver that a payload names (kConductor if it
// is too short), and the payload with another sender.
InstanceId receiver_of(std::string_view payload);
std::string with_sender(std::string_view payload, InstanceId from);

// Decodes any bytes. Returns a message in which every count fits the bytes, every enumerator exists and every text is
// UTF-8, or an error that names the field. Members of a cluster trust each other with the rest: they have proved its
// key, and their fingerprints are equal.
Result<Envelope> decode(uint16_t type, std::string_view payload, double now);

}  // namespace xpyd::disagg

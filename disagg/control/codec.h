// Control messages <-> bytes: every struct of disagg/messages.h, field by field (codec_fields.h).
//
// Clocks of two processes have different origins, so a time travels as its age: the receiver's time
// is late by what the message was under way. 0, which means "none", stays 0.
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "disagg/messages.h"

namespace xpyd {

struct Envelope;

// Of the frame that carries `message`.
uint16_t frame_type(const Message& message);

// A frame's payload says who sent the message and for whom it is, before the message itself.
// `now`: Clock seconds, here.
std::string encode(InstanceId from, InstanceId to, const Message& message, double now);

// Whatever the bytes are: a message in which every count, enumerator, token id and text is in its
// range, or an error that names the field.
Result<Envelope> decode(uint16_t type, std::string_view payload, double now);

// For whoever passes a message on without looking inside.
Result<InstanceId> destination(std::string_view payload);

// Changes whenever a message's fields change: goes into the handshake, so that programs that would
// misread each other do not begin to talk.
uint64_t codec_schema();

}  // namespace xpyd

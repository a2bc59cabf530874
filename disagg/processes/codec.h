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
#include "disagg/processes/ranges.h"

namespace xpyd::disagg {

struct ClusterOptions;

// Of the model and context that the members of a cluster agree on.
Limits limits(const ClusterOptions& options);

// Of the frame that carries `message`.
uint16_t frame_type(const Message& message);

// A frame's payload says who sent the message and for whom it is, before the message itself.
// `now`: Clock seconds, here.
std::string encode(InstanceId from, InstanceId to, const Message& message, double now);

// What a process lets in on one channel: who speaks there to whom, and the ranges of what is said.
// Nobody but the conductor, on its own channel, can say what the conductor says.
enum Way : uint8_t { kToInstance, kToConductor, kBetweenInstances, kAnyWay };
struct Door {
  Way way = kAnyWay;
  Limits limits = {};
};

// Whatever the bytes are: a message that may come this way, in which every count, enumerator, token
// id and text is in its range and the fields fit each other; or an error that names kind and field.
Result<Envelope> decode(uint16_t type, std::string_view payload, double now, const Door& door = {});

// Changes whenever a message's fields change: goes into the handshake, so that programs that would
// misread each other do not begin to talk.
uint64_t codec_schema();

}  // namespace xpyd::disagg

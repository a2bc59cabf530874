// A wire of the table with something around it, for tests that change a thing or two about it.
#pragma once

#include "disagg/transport/forwarding.h"

namespace xpyd::testing {

class WrappedTransport : public ForwardingTransport {
 public:
  WrappedTransport(const char* wire, const TransportOptions& options)
      : ForwardingTransport(find_transport(wire)->make(options).value()) {}
};

}  // namespace xpyd::testing

// A blocking form of KvTransport::connect().
#pragma once

#include <chrono>
#include <string>
#include <thread>

#include "disagg/transport/transport.h"

namespace xpyd::experiments {

// Calls connect() until it succeeds or fails. For callers that may block while their Clock advances.
inline Status connect_and_wait(KvTransport& transport, PeerId peer, const std::string& address) {
  for (;;) {
    const Result<bool> connected = transport.connect(peer, address);
    if (!connected) return connected.error();
    if (connected.value()) return ok();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace xpyd::experiments

// CUDA allows other threads everything while one captures a graph, but to wait for the whole card:
// that fails and spoils the capture. So who captures and who waits for the card take turns.
#pragma once

#include <mutex>

namespace xpyd::cuda {

// Held from the beginning to the end of a capture, and by vmm::wait_for_card().
inline std::mutex& capturing() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace xpyd::cuda

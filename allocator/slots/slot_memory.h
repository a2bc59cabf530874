// The memory behind slots (`--slot-prealloc`). Either all slots have it from the start, or slot_chunk more slots get it
// (LlamaCacheManager's cache_chunk_size) when a sequence needs a slot without memory. A slot keeps its memory.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "allocator/pool/pooled.h"

namespace xpyd::allocator {

inline Status check_chunks(const KvOptions& o) {
  if (o.slot_chunk <= 0) return ok();
  const char* why = o.device && o.device != &cpu_device() ? "the device or the transport allocates the pool as a whole"
                    : !o.rank_memory.empty() || o.pool_in_groups ? "the pool's memory is allocated elsewhere"
                    : !o.prefix_cache                            ? "it needs --prefix-cache blocks"
                                                                 : nullptr;
  if (why) return invalid(std::string("--slot-prealloc: ") + why + "; expected --slot-prealloc all");
  return ok();
}

// Touches slots [begin, end) every 4 KiB, so that the system backs them. It writes to bytes of these slots alone.
inline void touch_slots(const KvPlaces& places, int begin, int end) {
  for (const auto& [own, memory] : places.ranks) {
    const int planes = own.order == KvOrder::layer_major ? 2 * own.shape.n_layers : 1;
    for (int plane = 0; plane < planes; ++plane) {
      std::byte* from = memory.get() + own.offset(begin, plane / 2, plane % 2, 0, 0);
      const size_t bytes = size_t(end - begin) * own.block_bytes() / size_t(planes);
      const auto touch = [from](size_t at) { *reinterpret_cast<volatile std::byte*>(from + at) = std::byte{0}; };
      for (size_t at = 0; at < bytes; at += 4096) touch(at);
      touch(bytes - 1);  // `from` need not be the first byte of a page
    }
  }
}

// Reserves addresses without memory.
inline Result<std::shared_ptr<std::byte>> reserve_addresses(size_t bytes) {
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED)
    return Error{ErrorCode::unavailable, std::to_string(bytes) + " bytes of addresses: " + std::strerror(errno)};
  ::madvise(at, bytes, MADV_NOHUGEPAGE);  // because a page of 2 MiB would back many slots at once
  return std::shared_ptr<std::byte>(static_cast<std::byte*>(at), [bytes](std::byte* p) { ::munmap(p, bytes); });
}

inline Result<std::shared_ptr<KvPool>> make_chunked_slots(const PoolPlan& plan) {
  if (plan.of_ranks[0].slot_chunk <= 0) return make_blocks(plan, false);
  PoolPlan lazy = plan;
  std::vector<std::shared_ptr<std::byte>> memory;
  for (const KvOptions& own : plan.of_ranks) {
    Result<std::shared_ptr<std::byte>> addresses = reserve_addresses(own.pool_bytes);
    if (!addresses) return addresses.error();
    memory.push_back(std::move(addresses).value());
  }
  for (KvOptions& own : lazy.of_ranks) own.rank_memory = memory;
  return make_blocks(lazy, false);
}

}  // namespace xpyd::allocator

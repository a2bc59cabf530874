// What a memory with tiers below it (tiered.h) can do beside: a prompt's KV that is not there may be on its way.
#pragma once

#include "allocator/kv_handoff.h"

namespace xpyd::allocator {

class KvLoader {
 public:
  // Whether what reserve() found is in place. Once it says so, written_tokens() is what there is: a
  // failed read leaves less than reserve() promised. Until then: free() or wait.
  virtual bool ready(KvHandle handle) = 0;
  // Cached tokens that reserve() would promise: more than probe() where it would load some from a
  // tier. Any thread may call it.
  virtual int promise(std::span<const int32_t> tokens, uint64_t salt) const = 0;
  // Lets what goes on in the background (copies to and from tiers) make progress: its ends are
  // noticed here and in the calls that change a sequence. The owner calls it now and then. True:
  // something was under way, so that memory may have come free.
  virtual bool poll() = 0;
  // free() of a sequence that will be reserved again: what of it a tier has not is kept there
  // first, and waited for, since somebody wants the blocks now.
  virtual void set_aside(KvHandle handle) = 0;

 protected:
  ~KvLoader() = default;
};

}  // namespace xpyd::allocator

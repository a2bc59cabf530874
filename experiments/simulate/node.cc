#include "experiments/simulate/node.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace xpyd::disagg {
namespace {

// Copies nothing and is done at once.
class NullQueue final : public DeviceQueue {
 public:
  void copy(std::span<const Copy>, bool) override {}
  int64_t mark() override { return 0; }
  bool reached(int64_t) override { return true; }
  void wait() override {}
};

// Its memory is addresses alone: nobody writes there, so its pages stay zero and cost nothing. Page groups (vAttention)
// are those of the CPU device. Copies to and from the host take time on the instance's clock; the two directions run in
// parallel.
class NullDevice final : public Device {
 public:
  explicit NullDevice(Clock& clock) : clock_(clock) {}
  const char* name() const override { return "null"; }
  Result<std::shared_ptr<std::byte>> allocate(size_t bytes) override {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
      return Error{ErrorCode::unavailable, "cannot reserve addresses for " + std::to_string(bytes) + " bytes"};
    return std::shared_ptr<std::byte>(static_cast<std::byte*>(at), [bytes](std::byte* p) { munmap(p, bytes); });
  }
  Result<std::shared_ptr<std::byte>> allocate_host(size_t bytes) override { return allocate(bytes); }
  Result<std::shared_ptr<PageGroups>> make_page_groups(const PageGroupOptions& options) override {
    return cpu_device().make_page_groups(options);
  }
  std::unique_ptr<DeviceQueue> make_queue(Phase) override { return std::make_unique<NullQueue>(); }
  std::unique_ptr<DeviceQueue> make_copy_queue(double gbps) override {
    return std::make_unique<PacedQueue>(clock_, gbps * 1e9);
  }

 private:
  // A mark is the nanosecond at which all copies before it are done.
  class PacedQueue final : public DeviceQueue {
   public:
    PacedQueue(Clock& clock, double bytes_per_s) : clock_(clock), bytes_per_s_(bytes_per_s) {}
    void copy(std::span<const Copy> copies, bool) override {
      free_s_ = std::max(free_s_, clock_.now());
      for (const Copy& copy : copies) free_s_ += double(copy.bytes) / bytes_per_s_;
    }
    int64_t mark() override { return int64_t(std::ceil(free_s_ * 1e9)); }
    bool reached(int64_t mark) override { return clock_.now() * 1e9 >= double(mark); }
    void wait() override { clock_.sleep(std::max(0.0, free_s_ - clock_.now())); }

   private:
    Clock& clock_;
    const double bytes_per_s_;
    double free_s_ = 0;
  };
  Clock& clock_;
};

}  // namespace

Node::Node(Timeline& timeline, std::atomic<uint64_t>& version)
    : timeline_(timeline),
      version_(version),
      device_(std::make_unique<NullDevice>(time_.clock)),
      queue_(device_->make_queue()) {}

Node::~Node() = default;

// Reserves and appends the tokens as if they had been computed, then frees them. If there is no room, they are left
// out.
int Node::store(std::span<const int32_t> tokens) {
  KvMemory& memory = instance_->memory();
  const Result<KvReservation> reserved = memory.reserve(tokens, 0);
  if (!reserved) return 0;
  const KvReservation at = reserved.value();
  const std::span<const int32_t> rest = tokens.subspan(size_t(at.cached_tokens));
  const bool room = !at.loading && memory.append(at.handle, int(rest.size()));
  if (room) memory.commit(at.handle, rest);
  memory.free(at.handle);
  return room ? int(rest.size()) : 0;
}

void Node::wake() {
  ++version_;
  if (std::exchange(planned_, true)) return;
  timeline_.at(time_.clock.seconds, [this] { turn(); });
}

void Node::turn() {
  planned_ = false;
  held_block_s_ += held_ * (timeline_.now() - time_.clock.seconds);
  time_.clock.seconds = time_.began_s = timeline_.now();
  time_.wave_s = kNever;
  in_turn_ = true;
  for (const auto& first : std::exchange(first_, {})) first();
  const bool moved = instance_->turn();
  in_turn_ = false;
  ++version_;
  hold(time_.clock.seconds - time_.began_s);
  if (!moved) return;
  if (time_.wave_s < kNever) {
    if (time_.wave_s != std::exchange(wave_planned_s_, time_.wave_s)) timeline_.at(time_.wave_s, [this] { wake(); });
    return;
  }
  wake();
}

// Adds the blocks held now, for `seconds` that have passed.
void Node::hold(double seconds) {
  const KvStats kv = instance_->memory().stats();
  held_ = kv.capacity - kv.free - kv.cached;
  held_block_s_ += held_ * seconds;
}

}  // namespace xpyd::disagg

#include "experiments/simulate/node.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace xpyd::disagg {
namespace {

// Copies nothing, at once.
class NullQueue final : public DeviceQueue {
 public:
  void copy(std::span<const Copy>, bool) override {}
  int64_t mark() override { return 0; }
  bool reached(int64_t) override { return true; }
  void wait() override {}
};

// Its memory is addresses: nobody writes there, and the pages are zeros that cost nothing. Page groups (vattention) are
// the CPU's. Copies to and from the host go by the instance's clock, one direction beside the other.
class NullDevice final : public Device {
 public:
  explicit NullDevice(Clock& clock) : clock_(clock) {}
  const char* name() const override { return "null"; }
  Result<std::shared_ptr<std::byte>> allocate(size_t bytes) override {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return Error{ErrorCode::unavailable, "no addresses for " + std::to_string(bytes) + " bytes"};
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
  // A mark is the nanosecond at which what is before it is done.
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

Node::Node(Timeline& timeline, const StepCost& cost, double message_s, bool each_step, std::atomic<uint64_t>& version)
    : timeline_(timeline),
      terms_(cost.terms()),
      message_s_(message_s),
      each_step_(each_step),
      version_(version),
      device_(std::make_unique<NullDevice>(time_.clock)),
      queue_(device_->make_queue()) {}

Node::~Node() = default;

// As if it had computed them; where there is no room they are left out.
int Node::store(std::span<const int32_t> tokens) {
  KvMemory& memory = instance_->memory();
  const Result<KvReservation> reserved = memory.reserve(tokens, 0);
  if (!reserved) return 0;
  const KvReservation at = reserved.value();
  const std::span<const int32_t> rest = tokens.subspan(size_t(at.cached_tokens));
  const bool room = !at.loading && memory.append(at.handle, int(rest.size()));
  if (room) memory.written(at.handle, rest);
  memory.free(at.handle);
  return room ? int(rest.size()) : 0;
}

void Node::wake() {
  ++version_;
  if (run_.steps > 0) {  // the step that is under way ends, and no other begins
    const double now = timeline_.now();
    if (now <= time_.clock.seconds) {
      run_ = {};
      ++runs_;
    } else {
      const auto under_way = size_t(std::lower_bound(going_.ends_s.begin(), going_.ends_s.end(), now) -
                                    going_.ends_s.begin());
      if (under_way + 1 >= going_.ends_s.size()) return;
      going_.ends_s.resize(under_way + 1);
      return plan_end();
    }
  }
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
  if (!each_step_) begin_run();
  ++version_;
  if (run_.steps == 0) wake();
}

// For so long, now that the time is over.
void Node::hold(double seconds) {
  const KvStats kv = instance_->memory().stats();
  held_ = kv.capacity - kv.free - kv.cached;
  held_block_s_ += held_ * seconds;
}

void Node::begin_run() {
  // Who has been told what is in its cache must hear in time what it has lost.
  run_ = instance_->alike(most_, !instance_->options().cache_log);
  if (run_.steps < 2) run_ = {};
  if (run_.steps == 0) return;
  going_.ends_s.resize(size_t(run_.steps));
  taken_ = instance_->blocks_by_step(run_.steps);
  std::partial_sum(taken_.begin(), taken_.end(), taken_.begin());
  going_.requests = instance_->planned_requests();
  std::ranges::sort(going_.requests);
  double at = time_.clock.seconds;
  for (int j = 0; j < run_.steps; ++j) going_.ends_s[size_t(j)] = at += seconds(terms_, run_.shape(j));
  plan_end();
}

void Node::plan_end() {
  timeline_.at(going_.ends_s.back(), [this, number = ++runs_] { end_run(number); });
}

void Node::end_run(uint64_t number) {
  if (number != runs_) return;
  const double began_s = std::exchange(time_.clock.seconds, going_.ends_s.back());
  double from_s = began_s;
  for (size_t j = 0; j < going_.ends_s.size(); ++j)
    held_block_s_ += (held_ + taken_[j]) * (going_.ends_s[j] - std::exchange(from_s, going_.ends_s[j]));
  most_ = std::clamp(2 * int(going_.ends_s.size()), 16, 1 << 16);
  in_turn_ = true;
  instance_->repeat(run_, began_s, going_.ends_s);
  in_turn_ = false;
  hold(0);
  while (!said_.empty() && said_.front().ends_s.back() + message_s_ < timeline_.now()) said_.pop_front();
  said_.push_back(std::exchange(going_, {}));
  run_ = {};
  wake();  // with another version
}

namespace {

// Steps of which others know now: an end is heard a message later.
size_t heard(const std::vector<double>& ends_s, double now, double message_s) {
  return size_t(std::upper_bound(ends_s.begin(), ends_s.end(), now - message_s) - ends_s.begin());
}

}  // namespace

Unsaid Node::unsaid(double now) const {
  Unsaid all;
  const auto count = [&](const Said& said) {
    const size_t steps = heard(said.ends_s, now, message_s_);
    all.tokens += int64_t(steps * said.requests.size());
    if (steps < said.ends_s.size())
      all.until_s = std::min(all.until_s, said.ends_s[steps] + message_s_ - 1e-9);  // early is not late
  };
  for (const Said& said : said_)
    if (said.ends_s.back() + message_s_ > now) count(said);  // else it has been heard
  if (run_.steps == 0) return all;
  count(going_);
  // What the step that is under way needs is taken already.
  const auto begun = std::ranges::lower_bound(going_.ends_s, now) - going_.ends_s.begin();
  if (now > time_.clock.seconds) all.blocks = taken_[size_t(begun)];
  // At the very end of a step the next one has not begun.
  const double until_s = now > time_.clock.seconds ? going_.ends_s[size_t(begun)] : time_.clock.seconds;
  all.until_s = std::min(all.until_s, std::nextafter(until_s, kNever));
  return all;
}

int Node::unsaid_tokens(uint64_t request, double now) const {
  size_t steps = 0;
  const auto count = [&](const Said& said) {
    if (std::ranges::binary_search(said.requests, request)) steps += heard(said.ends_s, now, message_s_);
  };
  for (const Said& said : said_)
    if (said.ends_s.back() + message_s_ > now) count(said);
  if (run_.steps > 0) count(going_);
  return int(steps);
}

}  // namespace xpyd::disagg

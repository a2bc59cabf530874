// Fibres, their schedule, and the block's barrier.
#include "simt.h"

#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <memory>

#include "base/status.h"
#include "machine.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace xpyd::cuda::simt {

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t stack_bytes = 256 * 1024;
#else
constexpr size_t stack_bytes = 128 * 1024;
#endif
constexpr size_t guard_bytes = 4096;

thread_local FaultCatcher* catcher = nullptr;

void report_fault(const std::string& text) {
  XPYD_CHECK(catcher, text);
  catcher->add(text);
}

std::string triple(unsigned x, unsigned y, unsigned z) {
  return "(" + std::to_string(x) + "," + std::to_string(y) + "," + std::to_string(z) + ")";
}

}  // namespace

FaultCatcher::FaultCatcher() : outer_(catcher) { catcher = this; }
FaultCatcher::~FaultCatcher() { catcher = outer_; }

void host_fault(const std::string& what) { report_fault("host: " + what); }

std::string place_name(Where where) { return std::string(where.file_name()) + ":" + std::to_string(where.line()); }
std::string thread_name(const uint3& index) { return "thread " + triple(index.x, index.y, index.z); }

Machine::Machine() {
  shared = static_cast<std::byte*>(std::aligned_alloc(1024, max_shared_bytes));
  XPYD_CHECK(shared);
  ready_.reserve(max_block_threads);
}

Machine::~Machine() {
#if defined(__SANITIZE_ADDRESS__)
  // What is mapped at these addresses next is not a stack.
  for (auto& fibre : fibres) ASAN_UNPOISON_MEMORY_REGION(fibre->stack_bottom, stack_bytes);
  ASAN_UNPOISON_MEMORY_REGION(shared, max_shared_bytes);
#endif
  for (auto& fibre : fibres) munmap(fibre->stack, stack_bytes + guard_bytes);
  std::free(shared);
}

void Machine::add_fibre() {
  auto fibre = std::make_unique<Fibre>();
  void* memory = mmap(nullptr, stack_bytes + guard_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  XPYD_CHECK(memory != MAP_FAILED);
  mprotect(memory, guard_bytes, PROT_NONE);  // stacks grow down
  fibre->stack = static_cast<std::byte*>(memory);
  fibre->stack_bottom = fibre->stack + guard_bytes;
  fibre->stack_bytes = stack_bytes;
  // The stacks begin at different cache sets.
  size_t used = fibres.size() % 64 * 192 % 4096;
  fibre->context = boost::context::detail::make_fcontext(fibre->stack + guard_bytes + stack_bytes - used,
                                                         stack_bytes - used, &Machine::enter);
  fibre->machine = this;
  fibres.push_back(std::move(fibre));
}

// --- Switching. A fibre switches straight to the next one, and the host runs again when a block is done.
// ThreadSanitizer sees all fibres of a host thread as that thread, because its own fibres cost microseconds a switch.
// So the stacks that it prints from inside a kernel mean little.

[[gnu::always_inline]] inline void Machine::arrive([[maybe_unused]] Fibre& me,
                                                   boost::context::detail::transfer_t from) {
  auto& left = *static_cast<Fibre*>(from.data);
  left.context = from.fctx;
#if defined(__SANITIZE_ADDRESS__)
  // This also returns the bounds of the host's stack.
  __sanitizer_finish_switch_fiber(me.fake_stack, &left.stack_bottom, &left.stack_bytes);
#endif
}

[[gnu::always_inline]] inline void Machine::switch_to(Fibre& from, Fibre& to) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack_bottom, to.stack_bytes);
#endif
  self = &to;
  arrive(from, boost::context::detail::jump_fcontext(to.context, &from));
}

inline Fibre& Machine::next() {
  Fibre* fibre = ready_.back();
  ready_.pop_back();
  return *fibre;
}

void Machine::wake(Fibre& fibre) {
  fibre.state = State::ready;
  ready_.push_back(&fibre);
}

void Machine::enter(boost::context::detail::transfer_t from) {
  Fibre& me = running();
  Machine& m = *me.machine;
  arrive(me, from);
  for (;;) {
    try {
      if (!m.abandoned_) m.body_(m.body_context_);
      if (!m.abandoned_ && !me.copies.empty()) m.fault(me, "ends with a cp.async under way", Where());
    } catch (const Abandon&) {
    }
    me.state = State::done;
    me.warp->done |= 1u << me.lane;
    --m.n_live_;
    if (m.n_live_ > 0 && m.ready_.empty()) m.stuck();
    m.switch_to(me, m.n_live_ > 0 ? m.next() : m.host_);
  }
}

void Machine::wait(Fibre& fibre, State state, Where where) {
  fibre.state = state;
  fibre.where = where;
  if (ready_.empty()) stuck();
  Fibre& to = next();
  if (&to != &fibre) switch_to(fibre, to);
  if (abandoned_) throw Abandon{};
}

// --- Faults.

void Machine::report(const std::string& what) {
  report_fault("kernel " + std::string(kernel) + ", block " + triple(shape.index.x, shape.index.y, shape.index.z) +
               ", " + what);
}

void Machine::fault(const Fibre& fibre, const std::string& what, Where where) {
  report(thread_name(fibre.index) + (where.line() ? " at " + place_name(where) : "") + ": " + what);
  abandon();
  throw Abandon{};
}

// Lets every waiting fibre run, so that it unwinds.
void Machine::abandon() {
  abandoned_ = true;
  for (size_t i = 0; i < n_threads; ++i)
    if (fibres[i]->state != State::ready && fibres[i]->state != State::done) wake(*fibres[i]);
}

// Called when no fibre can run. Reports which threads wait where.
void Machine::stuck() {
  std::map<std::string, std::vector<const Fibre*>> groups;
  bool only_barrier = true;
  for (size_t i = 0; i < n_threads; ++i) {
    const Fibre& f = *fibres[i];
    std::string at = "finished";
    if (f.state == State::at_barrier) {
      at = "wait at __syncthreads, " + place_name(f.where);
    } else if (f.state == State::at_collective) {
      at = std::string("wait at ") + collective_name(f.kind) + ", " + place_name(f.where);
      only_barrier = false;
    } else if (f.state != State::done) {
      at = std::string("wait at ") +
           (f.state == State::at_mbarrier        ? "an mbarrier"
            : f.state == State::at_named_barrier ? "a barrier of some warps"
                                                 : "wgmma") +
           ", " + place_name(f.where);
      only_barrier = false;
    }
    groups[at].push_back(&f);
  }
  std::string text = only_barrier ? "barrier divergence:" : "deadlock:";
  for (const auto& [at, members] : groups)
    text += " " + std::to_string(members.size()) + " " + at + " (first " + thread_name(members[0]->index) + ");";
  text.pop_back();
  report(text);
  abandon();
}

// --- The barrier.

void sync_threads(Where where) {
  Fibre& me = running();
  Machine& m = *me.machine;
  if (m.n_at_barrier == 0) {
    m.barrier_where = where;
  } else if (!same_place(where, m.barrier_where)) {
    m.fault(me, "barrier divergence: others wait at the barrier of " + place_name(m.barrier_where), where);
  }
  if (++m.n_at_barrier < m.n_threads) return m.wait(me, State::at_barrier, where);
  m.n_at_barrier = 0;
  ++m.epoch;
  if (m.sm90_on) sm90_block_barrier(m);
  int n = int(m.n_threads);
  for (int i = 0; i < n; ++i) {
    Fibre& other = *m.fibres[size_t(m.forward ? n - 1 - i : i)];  // the last woken runs first
    if (&other != &me) m.wake(other);
  }
}

// --- Warp collectives.

const char* collective_name(Collective kind) {
  static const char* const names[] = {"__syncwarp", "__shfl_sync", "__shfl_up_sync", "__shfl_xor_sync", "a vote",
                                      "ldmatrix",   "mma"};
  return names[int(kind)];
}

void collective(Collective kind, unsigned mask, void* arguments, void (*complete)(Warp&), Where where) {
  Fibre& me = running();
  Machine& m = *me.machine;
  Warp& warp = *me.warp;
  unsigned bit = 1u << me.lane;
  me.kind = kind;
  me.arguments = arguments;
  me.where = where;
  if (mask != all_lanes || warp.lanes != all_lanes || warp.done != 0) [[unlikely]]
    m.fault(me,
            std::string(collective_name(kind)) + (mask != all_lanes ? ": only the mask of all lanes is interpreted"
                                                  : warp.lanes != all_lanes
                                                      ? ": the mask names lanes that the block does not have"
                                                      : ": the mask names lanes that have finished"),
            where);
  warp.waiting |= bit;
  if (warp.waiting != all_lanes) return m.wait(me, State::at_collective, where);
  for (int l = 0; l < 32; ++l) {
    const Fibre& other = *warp.lane[l];
    if (other.kind != kind || !same_place(other.where, where)) [[unlikely]]
      m.fault(me,
              std::string("warp divergence: this lane is at ") + collective_name(kind) + ", lane " + std::to_string(l) +
                  " at " + collective_name(other.kind) + " of " + place_name(other.where),
              where);
  }
  complete(warp);
  warp.waiting = 0;
  for (int i = 0; i < 32; ++i) {
    int l = m.forward ? 31 - i : i;
    if (l != me.lane) m.wake(*warp.lane[l]);
  }
}

// --- Launching.

void Machine::run(const char* name, dim3 grid, dim3 block, size_t shared_size, Body body, const void* context) {
  XPYD_CHECK(!self, "a kernel launches a kernel");
  kernel = name;
  n_threads = size_t(block.x) * block.y * block.z;
  size_t n_blocks = size_t(grid.x) * grid.y * grid.z;
  shape = {{0, 0, 0}, block, grid};
  std::string wrong;
  if (n_threads == 0 || n_threads > max_block_threads || block.z > 64)
    wrong = "a block of " + std::to_string(n_threads) + " threads";
  if (n_blocks == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    wrong = "a grid of " + triple(grid.x, grid.y, grid.z) + " blocks";
  if (shared_size > max_shared_bytes) wrong = std::to_string(shared_size) + " bytes of shared memory";
  if (!wrong.empty()) return report_fault("kernel " + std::string(name) + ": launched with " + wrong);

  while (fibres.size() < n_threads) add_fibre();
  warps.resize((n_threads + 31) / 32);
  if (cells.size() < (shared_size + 1) / 2) cells.resize((shared_size + 1) / 2);
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(shared, shared_size);
  ASAN_POISON_MEMORY_REGION(shared + shared_size, max_shared_bytes - shared_size);
#endif
  shared_bytes = shared_size;
  body_ = body;
  body_context_ = context;
  abandoned_ = false;
  ++n_launches_;
  // Nothing may depend on the order of blocks or threads. Blocks change their order from launch to launch, and threads
  // from block to block.
  for (size_t i = 0; i < n_blocks && !abandoned_; ++i) {
    size_t b = n_launches_ % 2 ? i : n_blocks - 1 - i;
    shape.index = {unsigned(b % grid.x), unsigned(b / grid.x % grid.y), unsigned(b / grid.x / grid.y)};
    forward = (b + n_launches_ / 2) % 2 == 0;
    run_block();
  }
  self = nullptr;
  if (abandoned_) std::fill(cells.begin(), cells.end(), Cell{});
}

void Machine::run_block() {
  if (epoch > 0xf0000000u) {
    std::fill(cells.begin(), cells.end(), Cell{});
    epoch = 1;
  }
  block_epoch = ++epoch;
  std::memset(shared, 0xff, shared_bytes);
  n_at_barrier = 0;
  sm90_on = false;
  for (size_t w = 0; w < warps.size(); ++w) {
    size_t n = std::min<size_t>(32, n_threads - w * 32);
    warps[w] = {.lanes = n == 32 ? ~0u : (1u << n) - 1};
  }
  uint3 index = {0, 0, 0};
  for (size_t i = 0; i < n_threads; ++i) {
    Fibre& f = *fibres[i];
    f.index = index;
    f.block = &shape;
    f.lane = int(i % 32);
    f.warp = &warps[i / 32];
    f.warp->lane[f.lane] = &f;
    f.who_base = uint32_t(i / 32) << 24 | uint32_t(i % 32) << 16;
    f.state = State::ready;
    f.copies.clear();
    f.group = 0;
    f.proxy_fences = 0;
    if (++index.x == shape.dim.x) {
      index.x = 0;
      if (++index.y == shape.dim.y) {
        index.y = 0;
        ++index.z;
      }
    }
  }
  for (size_t i = 0; i < n_threads; ++i) ready_.push_back(fibres[forward ? n_threads - 1 - i : i].get());
  n_live_ = n_threads;
  switch_to(host_, next());
  if (sm90_on && !abandoned_)
    if (std::string left = sm90_left_over(*this); !left.empty()) {
      report(left);
      abandoned_ = true;
    }
}

void run_grid(const char* name, dim3 grid, dim3 block, size_t shared_bytes, Body body, const void* context) {
  static thread_local Machine machine;
  machine.run(name, grid, block, shared_bytes, body, context);
}

}  // namespace xpyd::cuda::simt

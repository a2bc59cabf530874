// The internals of the interpreter: one Machine per host thread, with its fibres and the running block.
#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <memory>

#include "simt.h"

namespace xpyd::cuda::simt {

inline constexpr size_t max_block_threads = 1024, max_shared_bytes = 227 * 1024;

struct Abandon {};  // unwinds a fibre of a launch that has faulted

// The record of two bytes of shared memory since the last barrier. Epochs count barriers of the block. who = warp << 24
// | lane << 16 | number of __syncwarps; warp and lane may be `many`.
struct Cell {
  uint32_t write_epoch = 0, writer = 0, read_epoch = 0, reader = 0;
};
inline constexpr uint32_t under_way = ~0u;  // write_epoch of bytes that cp.async has not delivered

struct AsyncCopy {
  std::byte* to;
  uint4 value;
  int group;
};

enum class State : uint8_t { ready, at_barrier, at_collective, at_mbarrier, at_named_barrier, at_warpgroup, done };

struct Fibre;
struct Machine;
struct Warp {
  unsigned lanes = 0, waiting = 0, done = 0;  // a bit for each lane
  uint32_t epoch = 0;                         // number of __syncwarps so far
  Fibre* lane[32];
};

struct Fibre : Thread {
  boost::context::detail::fcontext_t context = nullptr;
  std::byte* stack = nullptr;  // null: the host's own stack
  const void* stack_bottom = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // of AddressSanitizer

  Machine* machine = nullptr;
  int lane = 0;
  Warp* warp = nullptr;
  uint32_t who_base = 0;
  State state = State::done;
  Where where;  // source line at which it waits
  Collective kind{};
  void* arguments = nullptr;  // of the collective at which it waits
  std::vector<AsyncCopy> copies;
  int group = 0;  // the open group of cp.async
  uint32_t proxy_fences = 0;

  uint32_t who() const { return who_base | (warp->epoch & 0xffff); }
};

// Barriers in shared memory, bulk copies and wgmma (sm90.cc).
struct Sm90;
struct Sm90Deleter {
  void operator()(Sm90* state) const;
};
enum class Access { read, write };

struct Machine {
  Machine();
  ~Machine();
  Machine(const Machine&) = delete;
  void run(const char* name, dim3 grid, dim3 block, size_t shared, Body body, const void* context);

  // Called by fibres.
  void wait(Fibre& fibre, State state, Where where);
  void wake(Fibre& fibre);
  [[noreturn]] void fault(const Fibre& fibre, const std::string& what, Where where);

  const char* kernel = nullptr;
  BlockShape shape{};
  size_t n_threads = 0, shared_bytes = 0;
  bool forward = true;  // the order in which this block's threads start and wake
  std::byte* shared = nullptr;
  std::vector<Cell> cells;
  uint32_t epoch = 1, block_epoch = 1;

  // The state of the barrier under way.
  size_t n_at_barrier = 0;
  Where barrier_where;

  bool sm90_on = false;  // since the block's first mbarrier: races are tracked there instead of in `cells`
  std::unique_ptr<Sm90, Sm90Deleter> sm90;

  std::vector<std::unique_ptr<Fibre>> fibres;
  std::vector<Warp> warps;

 private:
  void add_fibre();
  void run_block();
  void report(const std::string& what);
  void abandon();
  void stuck();
  Fibre& next();
  static void switch_to(Fibre& from, Fibre& to);
  static void arrive(Fibre& me, boost::context::detail::transfer_t from);
  static void enter(boost::context::detail::transfer_t from);

  Fibre host_;
  std::vector<Fibre*> ready_;  // a stack: a warp's lanes run close together
  size_t n_live_ = 0;
  bool abandoned_ = false;
  Body body_ = nullptr;
  const void* body_context_ = nullptr;
  uint64_t n_launches_ = 0;
};

void sm90_access(Machine& m, size_t begin, size_t bytes, Access kind, Where where);
void sm90_block_barrier(Machine& m);
std::string sm90_left_over(const Machine& m);  // what is pending when a block ends; "" if nothing

inline Fibre& running() { return *static_cast<Fibre*>(self); }
inline bool same_place(Where a, Where b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}
std::string place_name(Where where);  // file:line
std::string thread_name(const uint3& index);
const char* collective_name(Collective kind);

inline constexpr unsigned all_lanes = ~0u;
// Waits until all 32 lanes of the warp are at the same collective. The last to arrive runs `complete`.
void collective(Collective kind, unsigned mask, void* arguments, void (*complete)(Warp&), Where where);

}  // namespace xpyd::cuda::simt

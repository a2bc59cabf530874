// mbarriers, bulk tensor copies, wgmma and barriers of some warps, and the races between them.
//
// Vector clocks track order from a block's first mbarrier_init on. Each warp is an agent, and so is each mbarrier, on
// whose behalf the copy engine writes. A warp knows what an agent did at its time t if the warp's clock has at least t
// in that agent's place.
#include <algorithm>
#include <array>
#include <map>

#include "base/cuda/cuda.h"
#include "machine.h"

namespace xpyd::cuda {

namespace {
struct Boxes {  // the contents of a TensorMap here
  const std::byte* data;
  size_t rows, columns, row_stride;
  int box_rows;
};
static_assert(sizeof(Boxes) <= sizeof(TensorMap));
}  // namespace

TensorMap make_tensor_map(const BoxedMatrix& m) {
  XPYD_CHECK(reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && m.row_stride % 16 == 0 &&
             m.row_stride < size_t{1} << 40 && m.rows > 0 && m.rows <= size_t{1} << 32 && m.columns > 0 &&
             m.columns <= size_t{1} << 32 && m.columns * 2 <= m.row_stride && m.box_rows > 0 && m.box_rows <= 256);
  Boxes boxes{static_cast<const std::byte*>(m.data), m.rows, m.columns, m.row_stride, m.box_rows};
  TensorMap map{};
  std::memcpy(&map, &boxes, sizeof boxes);
  return map;
}

namespace simt {

namespace {

constexpr size_t max_warps = 32, max_barriers = 32, row_bytes = 2 * size_t(kBoxColumns);
constexpr uint32_t poison = 0xffffffffu;

struct Clock {
  std::array<uint32_t, max_warps + max_barriers> at{};
  void join(const Clock& other) {
    for (size_t i = 0; i < at.size(); ++i) at[i] = std::max(at[i], other.at[i]);
  }
};

// The record of 16 bytes of shared memory.
struct Piece {
  uint32_t block = 0;  // the block that all below belongs to
  bool written = false, by_thread = false;
  uint32_t writer = 0, write_time = 0;      // agent
  const Fibre* thread = nullptr;            // if by_thread: the thread that wrote it
  uint32_t fences = 0;                      // its number of fence_proxy_async before that
  std::array<uint32_t, max_warps> reads{};  // times
};

struct BoxCopy {
  std::byte* to;
  const TensorMap* map;
  int column, row;
};
struct Mbarrier {
  int arrivals = 0, pending = 0;
  long long bytes = 0;  // expected and not arrived
  uint32_t phase = 0;
  uint32_t agent = 0, initialiser = 0, initialised = 0;
  bool published = false;
  Clock arriving, completed;
  std::vector<BoxCopy> copies;
  std::vector<Fibre*> waiting;
};
struct NamedBarrier {
  int expected = 0, arrived = 0;
  Clock clock;
  std::vector<Fibre*> waiting;
};

struct Wgmma {
  int group;
  Where where;
  Product product;  // of the first thread
  std::array<const uint32_t*, 128> a_places;
  std::array<std::array<uint32_t, 4>, 128> a;
};
struct Accumulator {
  int blocks = 0, pending = 0;
  std::array<float*, 128> d;
  std::vector<float> value;  // [64][8 * blocks]
};
enum class Step { fence, product, commit, wait };
struct Warpgroup {
  // The step under way.
  int arrived = 0;
  Step step{};
  Where where;
  std::array<const void*, 128> arguments{};
  std::array<Fibre*, 128> threads{};

  std::vector<Wgmma> products;
  std::map<const float*, Accumulator> accumulators;  // by the first thread's d
  int committed = 0;
  bool fenced = false;
};

float f32(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }
uint32_t warp_of(const Fibre& fibre) { return fibre.who_base >> 24; }

}  // namespace

// The state of one machine's running block.
struct Sm90 {
  explicit Sm90(Machine& machine) : m(machine) {}
  Machine& m;
  uint32_t block = 0;
  std::vector<Clock> warps;
  std::map<size_t, Mbarrier> barriers;  // by offset in shared memory
  std::array<NamedBarrier, 16> named;
  std::vector<Warpgroup> groups;
  std::vector<Piece> pieces;

  void begin_block() {
    ++block;
    warps.assign((m.n_threads + 31) / 32, Clock{});
    for (size_t w = 0; w < warps.size(); ++w) warps[w].at[w] = 1;
    barriers.clear();
    named.fill({});
    groups.assign(m.n_threads / 128, {});
    pieces.resize(max_shared_bytes / 16);
  }

  Clock& clock_of(const Fibre& fibre) { return warps[warp_of(fibre)]; }
  // Returns a clock. An agent that joins it knows what the warp did so far.
  Clock release(const Fibre& fibre) {
    Clock now = clock_of(fibre);
    ++clock_of(fibre).at[warp_of(fibre)];
    return now;
  }

  // --- Races.

  Piece& piece(size_t offset) {
    Piece& p = pieces[offset / 16];
    if (p.block != block) p = Piece{.block = block};
    return p;
  }
  std::string name_of(uint32_t agent) const {
    return agent < max_warps ? "warp " + std::to_string(agent) : "a bulk copy";
  }
  void check_known_write(const Piece& p, const Clock& clock, const char* what, size_t offset, Where where) {
    if (p.written && p.write_time > clock.at[p.writer])
      m.fault(running(),
              std::string("race: ") + what + " what " + name_of(p.writer) + (p.by_thread ? " wrote" : " writes") +
                  ", no barrier between (byte " + std::to_string(offset) + ")",
              where);
  }
  void check_known_reads(const Piece& p, const Clock& clock, size_t offset, Where where) {
    for (uint32_t w = 0; w < warps.size(); ++w)
      if (p.reads[w] > clock.at[w])
        m.fault(running(),
                "race: writes what warp " + std::to_string(w) + " reads, no barrier between (byte " +
                    std::to_string(offset) + ")",
                where);
  }
  void read(size_t offset, uint32_t first_warp, uint32_t n_warps, bool async, Where where) {
    Piece& p = piece(offset);
    if (!p.written)
      m.fault(running(), "read of shared memory that nothing has written yet (byte " + std::to_string(offset) + ")",
              where);
    for (uint32_t w = first_warp; w < first_warp + n_warps; ++w) {
      check_known_write(p, warps[w], "reads", offset, where);
      p.reads[w] = warps[w].at[w];
    }
    if (async && p.by_thread && p.thread->proxy_fences == p.fences)
      m.fault(running(),
              "wgmma reads what " + thread_name(p.thread->index) +
                  " wrote without a fence_proxy_async after it (byte " + std::to_string(offset) + ")",
              where);
  }
  void write(size_t offset, const Clock& known, uint32_t agent, uint32_t time, const Fibre* thread, Where where) {
    Piece& p = piece(offset);
    check_known_write(p, known, "writes", offset, where);
    check_known_reads(p, known, offset, where);
    p.written = true;
    p.writer = agent;
    p.write_time = time;
    p.by_thread = thread != nullptr;
    p.thread = thread;
    p.fences = thread ? thread->proxy_fences : 0;
  }

  // --- mbarriers.

  Mbarrier& find(const void* place, Where where) {
    auto found = barriers.find(size_t(static_cast<const std::byte*>(place) - m.shared));
    const Fibre& me = running();
    if (!m.sm90_on || found == barriers.end()) m.fault(me, "no mbarrier was initialised here", where);
    Mbarrier& b = found->second;
    if (!b.published || clock_of(me).at[b.initialiser] < b.initialised)
      m.fault(me, "race: this warp need not have seen the mbarrier's initialisation", where);
    return b;
  }
  void complete(Mbarrier& b) {
    if (b.pending > 0 || b.bytes != 0) return;
    ++b.phase;
    b.completed = b.arriving;
    b.completed.at[b.agent] = b.phase;
    b.arriving = {};
    b.pending = b.arrivals;
    for (Fibre* fibre : b.waiting) m.wake(*fibre);
    b.waiting.clear();
  }
  void deliver(Mbarrier& b) {
    auto copies = std::move(b.copies);
    b.copies.clear();
    for (const BoxCopy& copy : copies) {
      Boxes boxes;
      std::memcpy(&boxes, copy.map, sizeof boxes);
      for (int r = 0; r < boxes.box_rows; ++r)
        for (size_t piece_of_row = 0; piece_of_row < row_bytes / 16; ++piece_of_row) {
          uint16_t values[8] = {};
          for (int i = 0; i < 8; ++i) {
            long long row = copy.row + r, column = copy.column + (long long)(piece_of_row)*8 + i;
            if (row >= 0 && row < (long long)(boxes.rows) && column >= 0 && column < (long long)(boxes.columns))
              std::memcpy(&values[i], boxes.data + size_t(row) * boxes.row_stride + size_t(column) * 2, 2);
          }
          size_t at = size_t(copy.to - m.shared) + size_t(r) * row_bytes + piece_of_row * 16;
          std::memcpy(m.shared + swizzled(at), values, 16);
        }
      b.bytes -= (long long)(size_t(boxes.box_rows) * row_bytes);
    }
    complete(b);
  }
  static size_t swizzled(size_t address) { return address ^ (address >> 7 & 7) << 4; }

  // --- wgmma.

  // Waits until all 128 threads of the warpgroup are at this step. The last one runs it.
  template <class F>
  void together(Step step, const void* argument, F run, Where where) {
    Fibre& me = running();
    uint32_t warp = warp_of(me), lane_of_group = warp % 4 * 32 + uint32_t(me.lane);
    if (!m.sm90_on || warp / 4 >= groups.size())
      m.fault(me, "wgmma outside of a warpgroup of 128 threads, or before any mbarrier", where);
    Warpgroup& g = groups[warp / 4];
    if (g.arrived == 0) {
      g.step = step;
      g.where = where;
    } else if (step != g.step || !same_place(where, g.where)) {
      m.fault(me, "warpgroup divergence: others are at " + place_name(g.where), where);
    }
    g.arguments[lane_of_group] = argument;
    g.threads[lane_of_group] = &me;
    if (++g.arrived < 128) return m.wait(me, State::at_warpgroup, where);
    g.arrived = 0;
    run(g, warp / 4 * 4);
    for (Fibre* other : g.threads)
      if (other != &me) m.wake(*other);
  }

  void start(Warpgroup& g, Where where) {
    auto of = [&](size_t t) -> const Product& { return *static_cast<const Product*>(g.arguments[t]); };
    const Product& first = of(0);
    Wgmma next{g.committed, where, first, {}, {}};
    for (size_t t = 0; t < 128; ++t) {
      const Product& other = of(t);
      if (other.a_matrix != first.a_matrix || other.b_matrix != first.b_matrix || other.accumulate != first.accumulate)
        m.fault(*g.threads[t], "wgmma: descriptors differ within the warpgroup", where);
      next.a_places[t] = other.a;
      if (other.a) std::copy_n(other.a, 4, next.a[t].begin());
    }
    if (!g.fenced) m.fault(running(), "wgmma: no wgmma_fence since the last commit", where);
    Accumulator& d = g.accumulators[first.d];
    if (d.pending++ == 0) {
      d.blocks = first.blocks;
      d.value.resize(64 * 8 * size_t(d.blocks));
      for (size_t t = 0; t < 128; ++t) {
        d.d[t] = of(t).d;
        for_each_element(t, d.blocks, [&](size_t from, size_t to) { d.value[to] = d.d[t][from]; });
        std::fill_n(d.d[t], 4 * d.blocks, std::bit_cast<float>(poison));
      }
    }
    g.products.push_back(next);
  }
  // Thread t's element `from` of d[blocks][4] is element `to` of [64][8 blocks] (PTX ISA, "Register fragments for
  // wgmma.mma_async.m64nNk16": D).
  template <class F>
  static void for_each_element(size_t t, int blocks, F f) {
    size_t row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
    for (size_t n = 0; n < size_t(blocks); ++n)
      for (size_t j = 0; j < 4; ++j) f(4 * n + j, (row + j / 2 * 8) * size_t(blocks) * 8 + 8 * n + column + j % 2);
  }

  void finish(Warpgroup& g, uint32_t first_warp, int pending) {
    size_t n = 0;
    while (n < g.products.size() && g.products[n].group < g.committed - pending)
      multiply(g, g.products[n++], first_warp);
    for (size_t i = 0; i < n; ++i) {
      const float* key = g.products[i].product.d;
      Accumulator& d = g.accumulators[key];
      if (--d.pending > 0) continue;
      for (size_t t = 0; t < 128; ++t)
        for_each_element(t, d.blocks, [&](size_t from, size_t to) {
          if (std::bit_cast<uint32_t>(d.d[t][from]) != poison)
            m.fault(*g.threads[t], "wgmma: its accumulator was written before the wait", g.products[i].where);
          d.d[t][from] = d.value[to];
        });
      g.accumulators.erase(key);
    }
    g.products.erase(g.products.begin(), g.products.begin() + long(n));
  }

  void multiply(Warpgroup& g, const Wgmma& op, uint32_t first_warp) {
    const Product& p = op.product;
    static thread_local float a[64][16], b[16][256];
    if (p.a) {
      for (size_t t = 0; t < 128; ++t) {
        if (!std::equal(op.a[t].begin(), op.a[t].end(), op.a_places[t]))
          m.fault(*g.threads[t], "wgmma: its operand's registers were written before the wait", op.where);
        size_t row = t / 32 * 16 + t % 32 / 4, k = t % 4 * 2;
        for (size_t j = 0; j < 4; ++j)
          for (size_t i = 0; i < 2; ++i) a[row + j % 2 * 8][k + j / 2 * 8 + i] = f32(uint16_t(op.a[t][j] >> (16 * i)));
      }
    } else {
      load(p.a_matrix, 64, 2, false, first_warp, op.where, [&](size_t row, size_t at, float x) { a[row][at] = x; });
    }
    const size_t n = size_t(p.blocks) * 8;
    if (p.n_innermost)
      load(p.b_matrix, 16, size_t(p.blocks), true, first_warp, op.where,
           [&](size_t k, size_t column, float x) { b[k][column] = x; });
    else
      load(p.b_matrix, n, 2, false, first_warp, op.where, [&](size_t column, size_t k, float x) { b[k][column] = x; });
    // The sum is exact until it is rounded into d, as in mma_m16n8k16.
    std::vector<float>& d = g.accumulators[p.d].value;
    for (size_t row = 0; row < 64; ++row) {
      double sums[256];
      float* to = d.data() + row * n;
      for (size_t j = 0; j < n; ++j) sums[j] = p.accumulate ? double(to[j]) : 0;
      for (size_t k = 0; k < 16; ++k)
        for (size_t j = 0; j < n; ++j) sums[j] += double(a[row][k]) * double(b[k][j]);
      for (size_t j = 0; j < n; ++j) to[j] = float(sums[j]);
    }
  }

  // Loads the matrix of a descriptor: `rows` rows of `row_pieces` pieces of 8 elements. PTX ISA, "Matrix descriptor"
  // and "Strides": rows have 128 bytes and lie in groups of 8, `stride` apart. A row continues `leading` bytes further,
  // but only where n is innermost.
  template <class F>
  void load(uint64_t descriptor, size_t rows, size_t row_pieces, bool n_innermost, uint32_t first_warp, Where where,
            F set) {
    auto field = [&](int bit) { return size_t(descriptor >> bit & 0x3fff) << 4; };
    const size_t start = field(0), leading = field(16), stride = field(32);
    if (descriptor >> 62 != 1) m.fault(running(), "wgmma: only the 128-byte swizzle is interpreted", where);
    if (descriptor >> 49 & 7 || start >> 7 & 7)
      m.fault(running(), "wgmma: a matrix begins inside of a pattern of 1024 bytes", where);
    for (size_t row = 0; row < rows; ++row)
      for (size_t i = 0; i < row_pieces; ++i) {
        size_t at = start + row / 8 * stride + row % 8 * row_bytes + i % 8 * 16;
        if (n_innermost) at += i / 8 * leading;
        at = swizzled(at);
        if (at + 16 > m.shared_bytes)
          m.fault(running(), "wgmma reads outside of shared memory: byte " + std::to_string(at), where);
        read(at, first_warp, 4, true, where);
        uint16_t values[8];
        std::memcpy(values, m.shared + at, 16);
        for (size_t j = 0; j < 8; ++j) set(row, 8 * i + j, f32(values[j]));
      }
  }
};

// --- Called by the machine.

void Sm90Deleter::operator()(Sm90* state) const { delete state; }

void sm90_access(Machine& m, size_t begin, size_t bytes, Access kind, Where where) {
  Sm90& s = *m.sm90;
  Fibre& me = running();
  uint32_t warp = warp_of(me);
  for (size_t at = begin / 16 * 16; at < begin + bytes; at += 16) {
    if (kind == Access::read)
      s.read(at, warp, 1, false, where);
    else
      s.write(at, s.warps[warp], warp, s.warps[warp].at[warp], &me, where);
  }
}
void sm90_block_barrier(Machine& m) {
  Clock all;
  for (const Clock& clock : m.sm90->warps) all.join(clock);
  for (size_t w = 0; w < m.sm90->warps.size(); ++w) {
    m.sm90->warps[w] = all;
    ++m.sm90->warps[w].at[w];
  }
}
std::string sm90_left_over(const Machine& m) {
  for (const auto& [offset, b] : m.sm90->barriers)
    if (!b.copies.empty() || b.bytes != 0) return "ends with a bulk copy under way";
  for (size_t id = 0; id < m.sm90->named.size(); ++id)
    if (m.sm90->named[id].arrived > 0) return "ends with arrivals at barrier " + std::to_string(id);
  for (const Warpgroup& g : m.sm90->groups)
    if (!g.products.empty()) return "ends with a wgmma under way";
  return "";
}

// --- Called by kernels.

static Sm90& state_of(Where where) {
  Machine& m = *running().machine;
  if (!m.sm90) m.fault(running(), "no mbarrier was initialised here", where);
  return *m.sm90;
}

void mbarrier_init_at(const uint64_t* place, int arrivals, Where where) {
  Fibre& me = running();
  Machine& m = *me.machine;
  if (!m.sm90) m.sm90.reset(new Sm90(m));
  if (!m.sm90_on) m.sm90->begin_block();
  m.sm90_on = true;
  Sm90& s = *m.sm90;
  size_t offset = size_t(reinterpret_cast<const std::byte*>(place) - m.shared);
  if (arrivals < 1 || s.barriers.size() == max_barriers || s.barriers.contains(offset))
    m.fault(me, "mbarrier_init: twice, without arrivals, or too many barriers", where);
  Mbarrier& b = s.barriers[offset];
  b.arrivals = b.pending = arrivals;
  b.agent = uint32_t(max_warps + s.barriers.size() - 1);
  b.initialiser = warp_of(me);
  b.initialised = s.clock_of(me).at[b.initialiser];
}
void mbarrier_init_done() {
  for (auto& [offset, b] : running().machine->sm90->barriers) b.published = true;
}

void mbarrier_arrive_at(const uint64_t* place, int bytes, Where where) {
  Fibre& me = running();
  Sm90& s = state_of(where);
  Mbarrier& b = s.find(place, where);
  if (b.pending == 0) me.machine->fault(me, "mbarrier: more arrivals than it was made for", where);
  constexpr long long most_bytes = (1 << 20) - 1;  // PTX ISA, "tx-count"
  if (bytes < 0 || b.bytes + bytes > most_bytes)
    me.machine->fault(me, "mbarrier: a phase can wait for 1048575 bytes at most", where);
  b.bytes += bytes;
  --b.pending;
  b.arriving.join(s.release(me));
  s.complete(b);
}

void mbarrier_wait_at(const uint64_t* place, int parity, Where where) {
  Fibre& me = running();
  Machine& m = *me.machine;
  Mbarrier& b = state_of(where).find(place, where);
  if (parity != 0 && parity != 1) m.fault(me, "mbarrier: a parity is 0 or 1", where);
  if (b.phase % 2 == uint32_t(parity)) m.sm90->deliver(b);
  while (b.phase % 2 == uint32_t(parity)) {
    b.waiting.push_back(&me);
    m.wait(me, State::at_mbarrier, where);
  }
  m.sm90->clock_of(me).join(b.completed);
}

void copy_box_to(bf16* to, const TensorMap& map, int column, int row, const uint64_t* barrier, Where where) {
  Fibre& me = running();
  Machine& m = *me.machine;
  Mbarrier& b = state_of(where).find(barrier, where);
  Boxes boxes;
  std::memcpy(&boxes, &map, sizeof boxes);
  size_t begin = size_t(reinterpret_cast<std::byte*>(to) - m.shared);
  size_t bytes = size_t(boxes.box_rows) * row_bytes;
  if (begin % 1024 != 0) m.fault(me, "bulk copy: byte " + std::to_string(begin) + " is not a multiple of 1024", where);
  if (begin + bytes > m.shared_bytes) m.fault(me, "bulk copy: ends outside of shared memory", where);
  // The part inside the matrix is read. Addresses that are only reserved may not be read.
  const long long columns = (long long)(boxes.columns), rows = (long long)(boxes.rows),
                  from = std::clamp((long long)(column), 0ll, columns),
                  to_column = std::clamp(column + (long long)(kBoxColumns), 0ll, columns);
  for (long long r = std::max(row, 0); r < std::min(row + (long long)(boxes.box_rows), rows); ++r)
    if (to_column > from &&
        !is_device_memory(boxes.data + size_t(r) * boxes.row_stride + size_t(from) * 2, size_t(to_column - from) * 2))
      m.fault(me, "bulk copy: row " + std::to_string(r) + " of its matrix is not in device memory", where);
  // The write is made on behalf of the barrier, and is known once its phase has ended.
  for (size_t at = begin; at < begin + bytes; at += 16)
    m.sm90->write(at, m.sm90->clock_of(me), b.agent, b.phase + 1, nullptr, where);
  std::memset(m.shared + begin, 0xff, bytes);
  b.copies.push_back({reinterpret_cast<std::byte*>(to), &map, column, row});
  if (!b.waiting.empty()) m.sm90->deliver(b);
}

void fence_proxy_async() { ++running().proxy_fences; }

void barrier_of_some(int id, int threads, bool waits, Where where) {
  Fibre& me = running();
  Machine& m = *me.machine;
  if (!m.sm90_on) m.fault(me, "a barrier of some warps before any mbarrier", where);
  if (id < 1 || id > 15 || threads < 32 || threads % 32 != 0 || size_t(threads) > m.n_threads)
    m.fault(me, "barrier " + std::to_string(id) + " of " + std::to_string(threads) + " threads", where);
  NamedBarrier& b = m.sm90->named[size_t(id)];
  if (b.arrived > 0 && b.expected != threads)
    m.fault(me,
            "barrier " + std::to_string(id) + " of " + std::to_string(threads) + " threads: others wait for " +
                std::to_string(b.expected),
            where);
  b.expected = threads;
  b.clock.join(m.sm90->release(me));
  if (waits) b.waiting.push_back(&me);
  if (++b.arrived == threads) {
    for (Fibre* fibre : b.waiting) {
      m.sm90->clock_of(*fibre).join(b.clock);
      if (fibre != &me) m.wake(*fibre);
    }
    b = {};
  } else if (waits) {
    m.wait(me, State::at_named_barrier, where);
  }
}

void wgmma(const Product& mine, Where where) {
  Sm90& s = state_of(where);
  s.together(
      Step::product, &mine, [&](Warpgroup& g, uint32_t) { s.start(g, where); }, where);
}
void wgmma_fence(Where where) {
  state_of(where).together(
      Step::fence, nullptr, [](Warpgroup& g, uint32_t) { g.fenced = true; }, where);
}
void wgmma_commit(Where where) {
  state_of(where).together(
      Step::commit, nullptr,
      [](Warpgroup& g, uint32_t) {
        ++g.committed;
        g.fenced = false;
      },
      where);
}
void wgmma_wait_for(int pending, Where where) {
  Sm90& s = state_of(where);
  s.together(
      Step::wait, nullptr, [&](Warpgroup& g, uint32_t first_warp) { s.finish(g, first_warp, pending); }, where);
}

}  // namespace simt
}  // namespace xpyd::cuda

// Shared memory and its shadow, with one Cell for two bytes.
#include <algorithm>

#include "machine.h"

namespace xpyd::cuda::simt {

namespace {

constexpr uint32_t many = 0xff;  // stands for several lanes or warps

uint32_t warp_of(uint32_t who) { return who >> 24; }
uint32_t lane_of(uint32_t who) { return who >> 16 & 0xff; }
uint32_t syncs_of(uint32_t who) { return who & 0xffff; }
uint32_t join(uint32_t warp, uint32_t lane, uint32_t syncs) { return warp << 24 | lane << 16 | syncs; }

// Tells whether two accesses by different threads between the same two block barriers are unordered. They are ordered
// if one warp made both and a __syncwarp lies between.
bool unordered(uint32_t earlier, uint32_t now) {
  return earlier != now && (warp_of(earlier) != warp_of(now) || syncs_of(earlier) == syncs_of(now));
}

std::string name_of(uint32_t who) {
  if (warp_of(who) == many) return "threads of several warps";
  std::string warp = "warp " + std::to_string(warp_of(who));
  if (lane_of(who) == many) return "lanes of " + warp;
  return "lane " + std::to_string(lane_of(who)) + " of " + warp;
}

struct Range {
  Machine& m;
  const Fibre& me;
  size_t begin, bytes;
  Where where;

  [[noreturn]] void fault(const std::string& what, const Cell* cell = nullptr) const {
    size_t at = cell ? size_t(cell - m.cells.data()) * 2 : begin;
    m.fault(me, what + " (byte " + std::to_string(at) + " of the block's " + std::to_string(m.shared_bytes) + ")",
            where);
  }
  Cell* first() const { return m.cells.data() + begin / 2; }
  Cell* last() const { return m.cells.data() + (begin + bytes + 1) / 2; }
};

Range range(const void* place, size_t bytes, Where where) {
  Machine& m = *running().machine;
  Range r{m, running(), size_t(static_cast<const std::byte*>(place) - m.shared), bytes, where};
  if (r.begin > m.shared_bytes || bytes > m.shared_bytes - r.begin)
    m.fault(r.me,
            "shared memory out of range: " + std::to_string(bytes) + " bytes at byte " +
                std::to_string((long long)(r.begin)) + " of the block's " + std::to_string(m.shared_bytes),
            where);
  return r;
}

void check_initialised(const Range& r, const Cell& cell) {
  if (cell.write_epoch == under_way) r.fault("read of what cp.async has not delivered", &cell);
  if (cell.write_epoch < r.m.block_epoch) r.fault("read of shared memory that nothing has written yet", &cell);
}

void check_readers(const Range& r, const Cell& cell, uint32_t who) {
  if (cell.read_epoch == r.m.epoch && unordered(cell.reader, who))
    r.fault("race: writes what " + name_of(cell.reader) + " read, no barrier between", &cell);
}

void check_writer(const Range& r, const Cell& cell, uint32_t who, const char* what) {
  if (cell.write_epoch == under_way) r.fault(std::string("race: ") + what + " where cp.async is under way", &cell);
  if (cell.write_epoch == r.m.epoch && unordered(cell.writer, who))
    r.fault(std::string("race: ") + what + " what " + name_of(cell.writer) + " wrote, no barrier between", &cell);
}

}  // namespace

std::byte* shared_base() { return running().machine->shared; }

void index_fault(long long index, long long count, long long n, size_t element_bytes, Where where) {
  running().machine->fault(running(),
                           "index out of range: elements [" + std::to_string(index) + ", " +
                               std::to_string(index + count) + ") of a shared array of " + std::to_string(n) + " (" +
                               std::to_string(element_bytes) + " bytes each)",
                           where);
}

void check_aligned(const void* place, size_t bytes, const char* what, Where where) {
  size_t offset = size_t(static_cast<const std::byte*>(place) - running().machine->shared);
  if (offset % bytes != 0)
    running().machine->fault(
        running(),
        std::string(what) + ": byte " + std::to_string(offset) + " is not a multiple of " + std::to_string(bytes),
        where);
}

void check_read(const void* place, size_t bytes, Where where) {
  Range r = range(place, bytes, where);
  if (r.m.sm90_on) return sm90_access(r.m, r.begin, bytes, Access::read, where);
  uint32_t who = r.me.who(), epoch = r.m.epoch, block_epoch = r.m.block_epoch;
  for (Cell *cell = r.first(), *end = r.last(); cell != end; ++cell) {
    if (cell->write_epoch == epoch) {
      if (cell->writer != who) check_writer(r, *cell, who, "reads");
    } else if (cell->write_epoch - block_epoch > epoch - block_epoch) {
      check_initialised(r, *cell);
    }
    if (cell->read_epoch != epoch) {
      cell->read_epoch = epoch;
      cell->reader = who;
    } else if (cell->reader != who) {
      if (warp_of(cell->reader) != warp_of(who))
        cell->reader = join(many, many, 0);
      else if (syncs_of(cell->reader) == syncs_of(who))
        cell->reader = join(warp_of(who), many, syncs_of(who));
      else
        cell->reader = who;
    }
  }
}

void check_write(const void* place, size_t bytes, Where where) {
  Range r = range(place, bytes, where);
  if (r.m.sm90_on) return sm90_access(r.m, r.begin, bytes, Access::write, where);
  uint32_t who = r.me.who(), epoch = r.m.epoch;
  for (Cell *cell = r.first(), *end = r.last(); cell != end; ++cell) {
    check_readers(r, *cell, who);
    check_writer(r, *cell, who, "writes");
    cell->write_epoch = epoch;
    cell->writer = who;
  }
}

// --- cp.async: the bytes arrive when their thread waits, and are NaN until then.

void copy_16_async(std::byte* to, const void* from, bool valid, Where where) {
  constexpr size_t bytes = 16;
  check_aligned(to, bytes, "cp.async", where);
  check_write(to, bytes, where);
  Fibre& me = running();
  uint4 value = {0, 0, 0, 0};
  if (valid) {
    Machine& m = *me.machine;
    if (reinterpret_cast<uintptr_t>(from) % bytes != 0)
      m.fault(me, "cp.async: the global address is not a multiple of 16", where);
    if (!is_device_memory(from, bytes)) m.fault(me, "cp.async: reads outside of device memory", where);
    std::memcpy(&value, from, bytes);
  }
  std::memset(to, 0xff, bytes);
  Range r = range(to, bytes, where);
  for (Cell *cell = r.first(), *end = r.last(); cell != end; ++cell) cell->write_epoch = under_way;
  me.copies.push_back({to, value, me.group});
}

void cp_async_commit() { ++running().group; }

void copy_async_wait(int n_under_way) {
  Fibre& me = running();
  Machine& m = *me.machine;
  auto arrives = [&](const AsyncCopy& copy) {
    if (copy.group >= me.group - n_under_way) return false;
    std::memcpy(copy.to, &copy.value, sizeof copy.value);
    Cell* cell = m.cells.data() + (copy.to - m.shared) / 2;
    for (size_t i = 0; i < sizeof copy.value / 2; ++i) {
      cell[i].write_epoch = m.epoch;
      cell[i].writer = me.who();
    }
    return true;
  };
  std::erase_if(me.copies, arrives);
}

}  // namespace xpyd::cuda::simt

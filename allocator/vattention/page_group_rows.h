// PageGroupRows: page-group rows, with reference counts, which the vattention memories map behind their addresses. A
// page-group row (below: a row) holds the next T tokens of one sequence. It has one page group for each plane: in
// layer_major one for each (layer, K or V), in token_major one in all ("tensor slicing", vAttention section 8.2). A row
// has an address only while a memory maps it. On each rank, the group of (plane, row r) is plane * n_rows + r, so
// adjacent rows are adjacent in every plane.
//
// A row that no sequence needs may stay mapped behind slots, each with an idle reference. It counts as cached, though
// only the memories that own these references can free it.
#pragma once

#include "allocator/kv_pool.h"
#include "base/device/page_groups.h"

namespace xpyd::allocator {

// For one row on one rank: its tokens (0: a group is smaller than one token), planes, bytes.
int vattention_row_tokens(const KvOptions& options);
int vattention_planes(const KvLayout& layout);
int vattention_planes(const KvOptions& options);
size_t vattention_row_bytes(const KvOptions& options);
inline constexpr double kProcessAddresses = 0x1p47;  // bytes of a process on x86-64 with 4 KiB pages
// Makes a memory of `slots`, at the addresses of `ranges`, that maps rows of that pool.
std::unique_ptr<KvMemory> memory_over_rows(std::shared_ptr<KvPool> pool, const KvOptions& options,
                                           const KvPlaces& slots, std::vector<std::unique_ptr<VirtualRange>> ranges);

class PageGroupRows final : public KvPool {
 public:
  // `groups`: for each rank, vattention_planes() groups for each row.
  PageGroupRows(const KvLayout& layout, const KvShards& shards, std::vector<std::shared_ptr<PageGroups>> groups);
  PageGroups& groups(int rank) const { return *groups_[size_t(rank)]; }

  // Appends n free rows with one reference each. Each is the row after out.back() if that is free, so that one call can
  // map a run of adjacent rows. Otherwise a new run begins where kRun rows are free, if there is such a place. False:
  // fewer than n are free, and nothing has changed.
  [[nodiscard]] bool allocate(int n, std::vector<int32_t>& out);
  // Turns one reference of each row into an idle one, or back.
  void set_idle(std::span<const int32_t> rows, bool idle);
  void release_idle(std::span<const int32_t> rows);
  // Returns how many of the first rows have no user but the caller.
  int n_unshared(std::span<const int32_t> rows) const;

  KvStats stats() const override;
  void check_invariants(std::span<const int32_t> references, std::span<const int32_t> leases,
                        bool complete) const override;
  // Like check_invariants(), for the idle references of one user.
  void check_idle(std::span<const int32_t> idle, bool complete) const;

 private:
  static constexpr int kRun = 16;
  struct Row {
    Users users;
    int32_t idle = 0;  // idle references
  };

  Row& at(int32_t row) { return rows_[size_t(row)]; }
  const Row& at(int32_t row) const { return rows_[size_t(row)]; }
  bool free(int32_t row) const { return !at(row).users.any() && at(row).idle == 0; }
  void begin_use(int32_t row) override { n_cached_ -= cached(row); }
  void end_use(int32_t row) override { n_cached_ += cached(row); }
  bool cached(int32_t row) const override { return at(row).idle > 0; }
  int32_t run_start() const;

  const std::vector<std::shared_ptr<PageGroups>> groups_;  // [n_ranks]
  std::vector<Row> rows_;
};

}  // namespace xpyd::allocator

// PageGroupRows: the rows of page groups that vattention's memories map behind their addresses, with reference counts.
// A row is what one sequence needs for its next T tokens: one group for each plane, that is for each (layer, K or V) in
// layer_major and one in all in token_major ("tensor slicing", vAttention section 8.2). It has an address only while
// somebody maps it. Group of (plane, row r) = plane * n_rows + r, on each rank: neighbouring rows are neighbours in
// every plane.
//
// A row that nobody needs may still be mapped behind slots, each with an idle reference: it counts
// as cached, though only its owners can free it.
#pragma once

#include "allocator/kv_pool.h"
#include "base/device/page_groups.h"

namespace xpyd::allocator {

// Of one row on one rank: tokens (0: a group does not hold one), planes, bytes.
int vattention_row_tokens(const KvOptions& options);
int vattention_planes(const KvLayout& layout);
int vattention_planes(const KvOptions& options);
size_t vattention_row_bytes(const KvOptions& options);
// The memory of rows of that pool behind `slots`, which are at the addresses of `ranges`.
std::unique_ptr<KvMemory> memory_over_rows(std::shared_ptr<KvPool> pool, const KvOptions& options,
                                           const KvPlaces& slots, std::vector<std::unique_ptr<VirtualRange>> ranges);

class PageGroupRows final : public KvPool {
 public:
  // `groups`: of each rank, vattention_planes() for each row.
  PageGroupRows(const KvLayout& layout, const KvShards& shards, std::vector<std::shared_ptr<PageGroups>> groups);

  PageGroups& groups(int rank) const { return *groups_[size_t(rank)]; }

  // Appends n free rows of one reference each, each one after out.back() where that is free, so
  // that runs of neighbours can be mapped as one; a new run begins where the next kRun rows are
  // free, if there is such a place. False: there are not so many, and nothing has changed.
  [[nodiscard]] bool allocate(int n, std::vector<int32_t>& out);
  // One reference of each becomes idle, or is one again.
  void set_idle(std::span<const int32_t> rows, bool idle);
  void release_idle(std::span<const int32_t> rows);
  // Leading rows that have no other user than the caller.
  int n_unshared(std::span<const int32_t> rows) const;

  KvStats stats() const override;
  void check_invariants(std::span<const int32_t> references, std::span<const int32_t> leases,
                        bool complete) const override;
  // The same of one user's idle references.
  void check_idle(std::span<const int32_t> idle, bool complete) const;

 private:
  static constexpr int kRun = 16;
  struct Row {
    Users users;
    int32_t idle = 0;  // references
  };

  Row& at(int32_t row) { return rows_[size_t(row)]; }
  const Row& at(int32_t row) const { return rows_[size_t(row)]; }
  bool free(int32_t row) const { return !at(row).users.any() && at(row).idle == 0; }
  int64_t begin_use(std::span<const int32_t> rows) override;
  int64_t end_use(std::span<const int32_t> rows) override;
  bool cached(int32_t row) const override { return at(row).idle > 0; }
  int32_t run_start() const;

  const std::vector<std::shared_ptr<PageGroups>> groups_;  // [n_ranks]
  std::vector<Row> rows_;
};

}  // namespace xpyd::allocator

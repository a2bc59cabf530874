// KvTiers' traffic between host and disk: write-behind, the ends of operations, and what a disk that fails costs.
#include <cstring>
#include <utility>

#include "allocator/kv_tiers.h"
#include "base/log.h"

namespace xpyd {
namespace {

constexpr int kHeadroom = 4;         // 1 / of the host is free or clean, where the disk can keep up
constexpr int kWritesUnderWay = 16;  // blocks
constexpr int kReadsGivenUp = 3;     // failed reads after which the disk is not asked again

}  // namespace

int KvTiers::take_disk_slot() {
  if (free_disk_.empty()) {
    if (orders_[kDiskLeaf].empty()) return -1;
    remove(std::get<2>(*orders_[kDiskLeaf].begin()));
    ++stats_.disk_evictions;
  }
  const int slot = free_disk_.back();
  free_disk_.pop_back();
  return slot;
}

void KvTiers::poll() {
  if (!disk_) return;
  std::lock_guard lock(mutex_);
  done_.clear();
  disk_->take(done_);
  for (const DiskFile::Done& done : done_) ended(done);
  write_behind();
}

void KvTiers::write_behind() {
  const int capacity = layout_.n_blocks;
  while (disk_on() && writing_ < kWritesUnderWay && !orders_[kDirty].empty() &&
         (int(free_host_.size()) + clean_ + writing_) * kHeadroom < capacity) {
    const int slot = take_disk_slot();
    if (slot < 0) return;
    const int32_t block = std::get<2>(*orders_[kDirty].begin());
    Block& b = at(block);
    b.writing = true;
    b.disk_target = slot;
    ++writing_;
    refresh(block);
    disk_->write(slot, host_.get() + layout_.offset(b.host, 0, 0, 0, 0), block);
  }
}

void KvTiers::ended(const DiskFile::Done& done) {
  const int32_t block = int32_t(done.id);
  Block& b = at(block);
  const bool good = done.outcome == DiskFile::Outcome::done;
  const std::string reason = done.error ? std::strerror(done.error) : "fewer bytes than asked for";
  const int64_t bytes = int64_t(layout_.block_bytes());
  if (done.write) {
    b.writing = false;
    --writing_;
    if (good) {
      b.disk = b.disk_target;
      b.checksum = done.checksum;
      stats_.disk_bytes_written += bytes;
    } else {
      free_disk_.push_back(b.disk_target);
      ++stats_.failed_writes;
    }
    b.disk_target = -1;
    refresh(block);
    if (!good) disk_failed("a write failed: " + reason, false);
    return;
  }
  b.reading = false;
  --reading_;
  if (good) {
    stats_.disk_bytes_read += bytes;
    refresh(block);
    return;
  }
  remove(block);
  if (done.outcome == DiskFile::Outcome::corrupt) {
    ++stats_.corrupt_reads;
    if (!std::exchange(logged_, true))
      log_line(LogLevel::warning, "xpyd: --disk-kv-dir %s: a block came back changed; it is computed again",
               options_.disk_dir.c_str());
    return;
  }
  ++stats_.failed_reads;
  disk_failed("a read failed: " + reason, ++failed_reads_ >= kReadsGivenUp);
}

// Nothing more is written there. `reads_too`: what it has is given up, too.
void KvTiers::disk_failed(const std::string& what, bool reads_too) {
  if (!writes_off_)
    log_line(LogLevel::error, "xpyd: --disk-kv-dir %s: %s; no more KV is written there", options_.disk_dir.c_str(),
             what.c_str());
  writes_off_ = true;
  if (!reads_too) return;
  for (int32_t block = 0; block < int32_t(blocks_.size()); ++block) {
    Block& b = at(block);
    if (b.uid == 0 || b.disk < 0 || b.busy() || b.pins > 0) continue;
    if (b.host < 0) {
      remove(block);
    } else {
      free_disk_.push_back(std::exchange(b.disk, -1));
      refresh(block);
    }
  }
}

}  // namespace xpyd

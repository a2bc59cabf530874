#include "allocator/disk_index.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <unordered_map>

namespace xpyd::allocator {
namespace {

constexpr std::string_view kMagic = "xpyd KV index ", kVersion = "1";
constexpr size_t kSum = sizeof(uint64_t);
constexpr size_t kMostBytes = size_t{1} << 32;

enum Kind : uint32_t { kDrop = 1, kPut, kPutFirst };

struct Head {  // of a record; of kDrop, that is all
  uint32_t kind;
  int32_t slot;
};
struct Put {  // then the tokens
  uint64_t uid, parent_uid, checksum;
};
static_assert(sizeof(Head) == 8 && sizeof(Put) == 24);

size_t record_bytes(uint32_t kind, int block_tokens) {
  return sizeof(Head) + (kind == kDrop ? 0 : sizeof(Put) + sizeof(int32_t) * size_t(block_tokens)) + kSum;
}

uint64_t sum_of(std::string_view record, size_t place) {
  return XXH3_64bits_withSeed(record.data(), record.size(), place);
}

template <class T>
T at(std::string_view bytes, size_t place) {
  T value;
  std::memcpy(&value, bytes.data() + place, sizeof value);
  return value;
}

template <class T>
void append(std::string& to, const T& value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::string head_of(const DiskIdentity& identity) {
  std::string head = std::string(kMagic) + std::string(kVersion) + "\n";
  for (auto [name, value] : identity) {
    std::ranges::replace_if(
        value, [](char c) { return uint8_t(c) < ' '; }, '?');
    head += name + ": " + value + "\n";
  }
  return head + "\n";
}

std::string_view line_of(std::string_view& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

// Of a log that does not begin with `head`.
std::string difference(std::string_view bytes, std::string_view head) {
  if (!bytes.starts_with(kMagic)) return "its index is none";
  for (std::string_view here = head; !here.empty();) {
    const std::string_view mine = line_of(here), its = line_of(bytes).substr(0, 200);
    if (mine == its) continue;
    if (mine.empty()) return "its index says more: " + std::string(its);
    const size_t name = mine.find(": ") + 2;
    if (mine.starts_with(kMagic)) return "its index is of another version";
    if (!its.starts_with(mine.substr(0, name))) return "its index does not say its " + std::string(mine, 0, name - 2);
    return "its " + std::string(mine, 0, name - 2) + " is " + std::string(its.substr(name)) + ", expected " +
           std::string(mine.substr(name));
  }
  return "its index is cut off, or changed";
}

Status failed(const std::string& path, const char* what) {
  return Error{ErrorCode::io, path + ": " + what + ": " + std::strerror(errno)};
}

}  // namespace

DiskIndexContents parse_disk_index(std::string_view bytes, const DiskIdentity& identity, int block_tokens) {
  DiskIndexContents found;
  const std::string head = head_of(identity);
  if (bytes.empty()) return found;
  if (!bytes.starts_with(head) || bytes.size() < head.size() + kSum ||
      at<uint64_t>(bytes, head.size()) != sum_of(head, 0)) {
    found.other = difference(bytes, head);
    return found;
  }
  std::unordered_map<int32_t, size_t> in_slot;  // of found.blocks
  size_t place = head.size() + kSum;
  while (bytes.size() - place >= record_bytes(kDrop, block_tokens)) {
    const Head record = at<Head>(bytes, place);
    if (record.kind < kDrop || record.kind > kPutFirst) break;
    const size_t size = record_bytes(record.kind, block_tokens);
    if (bytes.size() - place < size) break;
    if (at<uint64_t>(bytes, place + size - kSum) != sum_of(bytes.substr(place, size - kSum), place)) break;
    if (const auto other = in_slot.find(record.slot); other != in_slot.end()) {
      found.blocks[other->second].slot = -1;
      in_slot.erase(other);
    }
    if (record.kind != kDrop) {
      const Put put = at<Put>(bytes, place + sizeof(Head));
      in_slot[record.slot] = found.blocks.size();
      found.blocks.push_back({.slot = record.slot,
                              .first = record.kind == kPutFirst,
                              .uid = put.uid,
                              .parent_uid = put.parent_uid,
                              .checksum = put.checksum,
                              .tokens = std::vector<int32_t>(size_t(block_tokens))});
      std::memcpy(found.blocks.back().tokens.data(), bytes.data() + place + sizeof(Head) + sizeof(Put),
                  sizeof(int32_t) * size_t(block_tokens));
    }
    place += size;
  }
  std::erase_if(found.blocks, [](const DiskBlock& block) { return block.slot < 0; });
  found.cut = bytes.size() - place;
  return found;
}

DiskIndexContents read_disk_index(const std::string& path, const DiskIdentity& identity, int block_tokens) {
  const auto lost = [](const std::string& why) { return DiskIndexContents{.blocks = {}, .cut = 0, .other = why}; };
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (fd.get() < 0)
    return lost(errno == ENOENT ? "" : std::string("its index cannot be read: ") + std::strerror(errno));
  struct stat about;
  std::string bytes;
  const bool regular = ::fstat(fd.get(), &about) == 0 && S_ISREG(about.st_mode) && about.st_uid == ::geteuid() &&
                       size_t(about.st_size) <= kMostBytes;
  if (regular) bytes.resize(size_t(about.st_size));
  size_t got = 0;
  for (ssize_t n = 1; n > 0 && got < bytes.size(); got += size_t(std::max<ssize_t>(n, 0)))
    n = ::read(fd.get(), bytes.data() + got, bytes.size() - got);
  if (!regular) return lost("its index is no file that can be read");
  bytes.resize(got);  // what cannot be read is the end
  return parse_disk_index(bytes, identity, block_tokens);
}

// ---- Writing.

Result<std::unique_ptr<DiskIndex>> DiskIndex::create(const std::string& path, const DiskIdentity& identity) {
  const std::string beside = path + ".new";
  ::unlink(beside.c_str());  // of one who was killed at this
  Fd fd(::open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (fd.get() < 0) return failed(beside, "cannot be made").error();
  std::unique_ptr<DiskIndex> index(new DiskIndex(path, std::move(fd)));
  index->pending_ = head_of(identity);
  append(index->pending_, sum_of(index->pending_, 0));
  index->head_ = index->size_ = index->pending_.size();
  return index;
}

// pending_ from `begin` on is a record but for its checksum.
void DiskIndex::seal(size_t begin) {
  append(pending_, sum_of(std::string_view(pending_).substr(begin), size_));
  size_ += pending_.size() - begin;
}

void DiskIndex::put(int32_t slot, bool first, uint64_t uid, uint64_t parent_uid, uint64_t checksum,
                    std::span<const int32_t> tokens) {
  const size_t begin = pending_.size();
  append(pending_, Head{first ? kPutFirst : kPut, slot});
  append(pending_, Put{uid, parent_uid, checksum});
  pending_.append(reinterpret_cast<const char*>(tokens.data()), tokens.size_bytes());
  seal(begin);
  put_bytes_ = pending_.size() - begin;
  live_ += put_bytes_;
}

void DiskIndex::drop(int32_t slot) {
  const size_t begin = pending_.size();
  append(pending_, Head{kDrop, slot});
  seal(begin);
  live_ -= std::min(live_, put_bytes_);
}

Status DiskIndex::flush() {
  if (failed_) return Error{ErrorCode::io, path_ + " is written no more"};
  size_t done = 0;
  while (done < pending_.size()) {
    const ssize_t n = ::write(fd_.get(), pending_.data() + done, pending_.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      failed_ = true;
      return failed(path_, "cannot be written");
    }
    done += size_t(n);
  }
  pending_.clear();
  return ok();
}

Status DiskIndex::commit() {
  if (Status written = flush(); !written) return written;
  if (::rename((path_ + ".new").c_str(), path_.c_str()) != 0) {
    failed_ = true;
    return failed(path_, "cannot be replaced");
  }
  return ok();
}

// ---- Whose files they are.

Result<std::unique_ptr<DiskName>> DiskName::take(const std::string& dir, const std::string& role) {
  constexpr int kMost = 4096;
  for (int n = 0; n < kMost; ++n) {
    const std::string path = dir + "/xpyd-" + role + "-" + std::to_string(n), data = path + ".kv";
    // A descriptor for the lock alone: the other one may have I/O under way when its process ends.
    Fd lock(::open(data.c_str(), O_RDONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    if (lock.get() < 0) return failed(data, "cannot be opened").error();
    struct stat about;
    if (::fstat(lock.get(), &about) != 0 || !S_ISREG(about.st_mode) || about.st_uid != ::geteuid() ||
        about.st_nlink != 1)
      return invalid(data + ": expected a file of this user's");
    if (::flock(lock.get(), LOCK_EX | LOCK_NB) == 0)
      return std::unique_ptr<DiskName>(new DiskName(path, std::move(lock), size_t(about.st_size)));
    if (errno != EWOULDBLOCK) return invalid(data + ": cannot be locked: " + os_text());
  }
  return invalid(dir + ": " + std::to_string(kMost) + " instances have their files there");
}

}  // namespace xpyd::allocator

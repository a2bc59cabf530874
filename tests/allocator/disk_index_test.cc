// The log of a disk tier that outlives its process: whatever is cut off, changed or killed on the way, what is read of
// it was true at some moment, and no later record is.
#include "allocator/disk_index.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "base/random.h"
#include "tests/catch.h"

namespace xpyd::testing::disk_index_test {
namespace {

constexpr int kTokens = 3;  // of a block
const DiskIdentity kIdentity = {{"model", "tiny 12"}, {"KV dtype", "f32"}, {"block", "3 tokens"}};

std::string bytes_of(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

void put(DiskIndex& index, const DiskBlock& b) {
  index.put(b.slot, b.first, b.uid, b.parent_uid, b.checksum, b.tokens);
}

using Model = std::map<int32_t, DiskBlock>;  // by slot

bool same(const std::vector<DiskBlock>& blocks, const Model& model) {
  if (blocks.size() != model.size()) return false;
  return std::ranges::all_of(blocks, [&](const DiskBlock& b) {
    const auto own = model.find(b.slot);
    return own != model.end() && own->second == b;
  });
}

// A log that is written on and on, and what it must say at each of its lengths.
struct Written {
  explicit Written(uint64_t seed) : random(seed) {}
  void begin(const std::string& path) {
    lengths.clear();
    auto made = DiskIndex::create(path, kIdentity);
    REQUIRE(made.ok());
    index = std::move(made).value();
    for (const auto& [slot, block] : model) put(*index, block);
    REQUIRE(index->commit().ok());
    lengths.push_back({std::filesystem::file_size(path), model});
  }
  void operate(const std::string& path) {
    const auto slot = int32_t(random.below(6));
    if (model.contains(slot)) {
      index->drop(slot);
      model.erase(slot);
    } else {
      DiskBlock b{.slot = slot,
                  .first = random.below(2) == 0,
                  .uid = ++uids,
                  .parent_uid = random.next(),
                  .checksum = random.next(),
                  .tokens = {}};
      for (int i = 0; i < kTokens; ++i) b.tokens.push_back(int32_t(random.next()));
      put(*index, b);
      model[slot] = b;
    }
    REQUIRE(index->flush().ok());
    lengths.push_back({std::filesystem::file_size(path), model});
  }
  const std::pair<size_t, Model>& at(size_t length) const {
    auto after = std::ranges::upper_bound(lengths, length, {}, &std::pair<size_t, Model>::first);
    REQUIRE(after != lengths.begin());
    return *std::prev(after);
  }
  Random random;
  uint64_t uids = 0;
  Model model;
  std::unique_ptr<DiskIndex> index;
  std::vector<std::pair<size_t, Model>> lengths;
};

TEST_CASE("disk index: cut at any length, it says what it said there", "[tiers][disk_index]") {
  TempDir dir;
  const std::string path = dir.path + "/index";
  Written written(1);
  written.begin(path);
  for (int i = 0; i < 30; ++i) written.operate(path);
  const std::string bytes = bytes_of(path);
  REQUIRE(written.model.size() > 2);
  for (size_t length = 0; length <= bytes.size(); ++length) {
    INFO(length);
    const DiskIndexContents found = parse_disk_index(std::string_view(bytes).substr(0, length), kIdentity, kTokens);
    if (length < written.lengths[0].first) {
      CHECK(found.blocks.empty());
      CHECK(found.other.empty() == (length == 0));
      continue;
    }
    CHECK(found.other.empty());
    CHECK(same(found.blocks, written.at(length).second));
    CHECK(found.cut == length - written.at(length).first);
  }
}

TEST_CASE("disk index: a changed byte is the end of it", "[tiers][disk_index]") {
  TempDir dir;
  const std::string path = dir.path + "/index";
  Written written(2);
  written.begin(path);
  for (int i = 0; i < 30; ++i) written.operate(path);
  const std::string bytes = bytes_of(path);
  for (size_t place = 0; place < bytes.size(); ++place)
    for (int bit : {0, 3, 7}) {
      INFO(place << " bit " << bit);
      std::string changed = bytes;
      changed[place] = char(changed[place] ^ (1 << bit));
      const DiskIndexContents found = parse_disk_index(changed, kIdentity, kTokens);
      if (place < written.lengths[0].first) {
        CHECK(found.blocks.empty());
        CHECK(!found.other.empty());
      } else {
        CHECK(same(found.blocks, written.at(place).second));
        CHECK(found.cut == bytes.size() - written.at(place).first);
      }
    }
  // Nor does a record count elsewhere.
  const size_t first = written.lengths[0].first, second = written.lengths[1].first;
  const std::string moved = bytes.substr(0, second) + bytes.substr(first, second - first);
  CHECK(parse_disk_index(moved, kIdentity, kTokens).cut == second - first);
}

TEST_CASE("disk index: of anything else nothing is read, and it says which", "[tiers][disk_index]") {
  TempDir dir;
  const std::string path = dir.path + "/index";
  Written written(3);
  written.begin(path);
  for (int i = 0; i < 9; ++i) written.operate(path);
  const std::string bytes = bytes_of(path);
  CHECK(read_disk_index(path, kIdentity, kTokens).blocks.size() == written.model.size());
  for (size_t i = 0; i < kIdentity.size(); ++i) {
    DiskIdentity other = kIdentity;
    other[i].second = "x";
    const DiskIndexContents found = read_disk_index(path, other, kTokens);
    CHECK(found.blocks.empty());
    CHECK(found.other == "its " + kIdentity[i].first + " is " + kIdentity[i].second + ", expected x");
    other.erase(other.begin() + ptrdiff_t(i));
    CHECK(!read_disk_index(path, other, kTokens).other.empty());
    CHECK(read_disk_index(path, other, kTokens).blocks.empty());
  }
  DiskIdentity more = kIdentity;
  more.push_back({"tokenizer", "1"});
  CHECK(read_disk_index(path, more, kTokens).other == "its index does not say its tokenizer");
  std::string version = bytes;
  version.replace(version.find('1'), 1, "2");
  CHECK(parse_disk_index(version, kIdentity, kTokens).other == "its index is of another version");
  CHECK(parse_disk_index("{}", kIdentity, kTokens).other == "its index is none");
  CHECK(read_disk_index(dir.path, kIdentity, kTokens).other == "its index is no file that can be read");
  const DiskIndexContents none = read_disk_index(dir.path + "/none", kIdentity, kTokens);
  CHECK((none.other.empty() && none.blocks.empty()));
  // Lines stay lines, whatever a folder is called.
  auto made = DiskIndex::create(path, {{"model", "a\nKV dtype: bf16"}});
  REQUIRE(made.ok());
  REQUIRE(made.value()->commit().ok());
  CHECK(bytes_of(path).starts_with("xpyd KV index 1\nmodel: a?KV dtype: bf16\n\n"));
}

TEST_CASE("disk index: killed at any moment and started again, against a model", "[tiers][disk_index][random]") {
  TempDir dir;
  const std::string path = dir.path + "/index";
  Written written(4);
  Random random(5);
  written.begin(path);
  size_t torn = 0, rewritten = 0;
  for (int life = 0; life < 300; ++life) {
    for (uint64_t i = random.below(40); i > 0; --i) {
      written.operate(path);
      if (random.below(20) == 0) written.begin(path), ++rewritten;
    }
    if (random.below(3) == 0) {  // killed while it is written anew
      auto half = DiskIndex::create(path, kIdentity);
      REQUIRE(half.ok());
      put(*half.value(), {.slot = 1, .first = true, .uid = 1, .parent_uid = 0, .checksum = 0, .tokens = {1, 2, 3}});
      if (random.below(2) == 0) REQUIRE(half.value()->flush().ok());
    }
    written.index.reset();
    const size_t least = written.lengths[0].first, most = written.lengths.back().first;
    const size_t length = least + random.below(most - least + 1);  // killed while it writes, too
    std::filesystem::resize_file(path, length);
    const DiskIndexContents found = read_disk_index(path, kIdentity, kTokens);
    REQUIRE(same(found.blocks, written.at(length).second));
    torn += found.cut > 0;
    written.model = written.at(length).second;
    written.begin(path);
  }
  CHECK(torn > 100);
  CHECK(rewritten > 100);
}

TEST_CASE("disk index: it grows to twice what it needs", "[tiers][disk_index]") {
  TempDir dir;
  const std::string path = dir.path + "/index";
  auto made = DiskIndex::create(path, kIdentity);
  REQUIRE(made.ok());
  DiskIndex& index = *made.value();
  REQUIRE(index.commit().ok());
  const std::vector<int32_t> tokens(4096);
  size_t puts = 0;
  for (; !index.grown(); ++puts) {
    if (puts > 0) index.drop(7);
    index.put(7, true, puts + 1, 0, 0, tokens);
    REQUIRE(index.flush().ok());
    REQUIRE(puts < 1000);
  }
  CHECK(std::filesystem::file_size(path) > size_t{1} << 20);
  CHECK(puts == 64);  // a mebibyte of records of 16 KiB
}

TEST_CASE("disk index: a file has one owner, and the next one finds it", "[tiers][disk_index]") {
  TempDir dir;
  auto first = DiskName::take(dir.path, "P"), second = DiskName::take(dir.path, "P"),
       other = DiskName::take(dir.path, "D");
  REQUIRE((first.ok() && second.ok() && other.ok()));
  CHECK(first.value()->data() == dir.path + "/xpyd-P-0.kv");
  CHECK(first.value()->index() == dir.path + "/xpyd-P-0.index");
  CHECK(second.value()->data() == dir.path + "/xpyd-P-1.kv");
  CHECK(other.value()->data() == dir.path + "/xpyd-D-0.kv");
  std::ofstream(first.value()->data()) << "four";
  std::unique_ptr<DiskName> gone = std::move(first).value();
  gone.reset();
  auto third = DiskName::take(dir.path, "P");
  REQUIRE(third.ok());
  CHECK(third.value()->data() == dir.path + "/xpyd-P-0.kv");
  CHECK(third.value()->bytes() == 4);
  struct stat about;
  REQUIRE(::stat(third.value()->data().c_str(), &about) == 0);
  CHECK((about.st_mode & 0777) == 0600);
  // What is no file of this user's is nobody's to take.
  const std::string text = dir.path + "/text";
  std::ofstream(text) << "mine";
  std::filesystem::create_symlink(text, dir.path + "/xpyd-L-0.kv");
  std::filesystem::create_hard_link(text, dir.path + "/xpyd-H-0.kv");
  std::filesystem::create_directory(dir.path + "/xpyd-F-0.kv");
  for (const char* role : {"L", "H", "F"}) {
    INFO(role);
    CHECK_FALSE(DiskName::take(dir.path, role).ok());
  }
  CHECK(bytes_of(text) == "mine");
  CHECK_FALSE(DiskName::take(dir.path + "/none", "P").ok());
}

}  // namespace
}  // namespace xpyd::testing::disk_index_test

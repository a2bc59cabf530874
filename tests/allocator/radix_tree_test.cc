// Compares the radix tree with a plain model: the tokens of each block, and the tokens that can be reached. Then tests
// the memory over it: hits to the token, eviction order, and copies of partly equal blocks.
#include "allocator/prefix/radix_tree.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "base/random.h"
#include "tests/allocator/kv_fixture.h"
#include "tests/catch.h"

namespace xpyd::testing::radix_tree_test {
namespace {

using Tokens = std::vector<int32_t>;

bool begins(const Tokens& with, std::span<const int32_t> tokens) {
  return with.size() >= tokens.size() && std::equal(tokens.begin(), tokens.end(), with.begin());
}

// Blocks and the path of each up to its last token, with the salt in front. Every lookup is a linear search.
struct Model {
  int block_tokens;
  std::map<int32_t, Tokens> blocks = {};

  int first_of(const Tokens& path) const { return (int(path.size()) - 2) / block_tokens * block_tokens; }
  // Some block has this path's tokens from the last block boundary on.
  bool backed(const Tokens& path) const {
    return std::ranges::any_of(
        blocks, [&](const auto& b) { return first_of(b.second) == first_of(path) && begins(b.second, path); });
  }
  int match(const Tokens& path) const {  // tokens after the salt
    int n = 0;
    while (n + 1 < int(path.size()) && backed(Tokens(path.begin(), path.begin() + n + 2))) ++n;
    return n;
  }
  // True if all tokens before this block's first token are present.
  bool reached(const Tokens& path) const {
    return match(Tokens(path.begin(), path.begin() + first_of(path) + 1)) == first_of(path);
  }
};

class TreeTrial {
 public:
  TreeTrial(int block_tokens, uint64_t seed)
      : model_{block_tokens},
        random_(seed),
        nodes_(kBlocks),
        tree_(kBlocks, block_tokens, nodes_.data(), sizeof(PrefixCache::Node), [this](int32_t block) { lost(block); }) {
  }

  void run(int operations) {
    for (int i = 0; i < operations; ++i) {
      const uint64_t what = random_.below(10);
      if (what < 4) grow(draw());
      if (what >= 4 && what < 6 && !running_.empty()) go_on(running_[random_.below(running_.size())]);
      if (what == 6 && !running_.empty()) running_.erase(running_.begin() + ptrdiff_t(random_.below(running_.size())));
      if (what == 7) erase();
      if (what > 7) compare(draw());
      if (i % 8 == 0) check();
    }
    CAPTURE(hits_, within_, lost_, deep_, refused_);
    CHECK(hits_ > operations / 50);
    CHECK((model_.block_tokens == 1) == (within_ == 0));
    CHECK(lost_ > operations / 200);
    CHECK(deep_ > 10);  // some erased blocks were in the middle
  }

 private:
  static constexpr int kBlocks = 60;
  struct Running {
    Tokens path;  // {salt, tokens …} that the tree has been told
    std::vector<int32_t> table;
    PrefixChain chain;
  };
  const PrefixCache::Locked locked_ = [](const std::function<void()>& f) { f(); };

  Tokens draw() {
    Tokens path{int32_t(random_.below(2))};
    int32_t letter = 0;
    for (size_t n = 1 + random_.below(size_t(model_.block_tokens) * 5 + 3); n > 0; --n)
      path.push_back(random_.below(12) == 0 ? letter = int32_t(random_.below(3)) : letter);
    return path;
  }
  int rows(const Tokens& path) const { return int(path.size()) - 1; }
  std::span<const int32_t> tokens(const Tokens& path) const { return std::span(path).subspan(1); }

  // Compares the result of match() with the model.
  int compare(const Tokens& path, std::vector<int32_t>* out = nullptr, PrefixChain* end = nullptr) {
    std::vector<int32_t> found;
    PrefixChain chain{.hash = uint64_t(path[0])};
    const int n = tree_.match(tokens(path), rows(path), chain, locked_,
                              [&](std::span<const int32_t> b) { found.insert(found.end(), b.begin(), b.end()); });
    const int bt = model_.block_tokens;
    REQUIRE(n == model_.match(path));
    REQUIRE(int(found.size()) == (n + bt - 1) / bt);
    for (int i = 0; i < int(found.size()); ++i) {
      const Tokens upto(path.begin(), path.begin() + 1 + std::min(n, (i + 1) * bt));
      REQUIRE(begins(model_.blocks.at(found[size_t(i)]), upto));
      REQUIRE(model_.first_of(model_.blocks.at(found[size_t(i)])) == i * bt);
    }
    hits_ += n > 0, within_ += n % bt != 0;
    if (out) *out = found, *end = chain;
    return n;
  }

  bool take(std::vector<int32_t>& table, int wanted) {
    std::set<int32_t> busy;
    for (const Running& r : running_) busy.insert(r.table.begin(), r.table.end());
    busy.insert(table.begin(), table.end());
    for (int32_t b = 0; b < kBlocks && int(table.size()) < wanted; ++b)
      if (!busy.count(b) && !model_.blocks.count(b)) table.push_back(b);
    return int(table.size()) == wanted;
  }

  // A new sequence takes what it finds, its own copy of a partly hit last block, and some of the tokens that were
  // asked.
  void grow(const Tokens& path) {
    Running r{{path[0]}, {}, {}};
    const int n = compare(path, &r.table, &r.chain);
    if (n % model_.block_tokens != 0) r.table.pop_back();
    r.path.assign(path.begin(), path.begin() + 1 + n);
    asked_ = Tokens(path.begin() + 1 + n, path.end());
    go_on(r);
    if (running_.size() < 5) running_.push_back(r);
  }

  void go_on(Running& r) {
    const int bt = model_.block_tokens;
    Tokens more = std::exchange(asked_, {});
    if (more.empty())
      for (size_t n = 1 + random_.below(4); n > 0; --n) more.push_back(int32_t(random_.below(3)));
    Tokens path = r.path;
    path.insert(path.end(), more.begin(), more.end());
    if (!take(r.table, (rows(path) + bt - 1) / bt)) {
      ++refused_;
      r.table.resize(size_t((rows(r.path) + bt - 1) / bt), -1);
      if (!r.table.empty() && r.table.back() < 0) r.chain.broken = true, r.table.pop_back();
      if (int(r.table.size()) * bt < rows(r.path))
        r.path.resize(r.table.size() * size_t(bt) + 1), r.chain.broken = true;
      return;
    }
    // The chain continues if its last full block, or an equal one, is still in place.
    const int from = rows(r.path) / bt * bt;
    if (!r.chain.first() && nodes_[size_t(r.chain.block)].uid != r.chain.uid) r.chain.broken = true;
    const bool broken = r.chain.broken;
    r.path = path;
    if (!broken) {
      // The model changes first, since the tree may drop shorter blocks on the way.
      const int known = model_.match(path);
      for (int i = from / bt; i < int(r.table.size()); ++i) {
        const Tokens upto(path.begin(), path.begin() + 1 + std::min(rows(path), (i + 1) * bt));
        if (rows(upto) > known) model_.blocks[r.table[size_t(i)]] = upto;
      }
    }
    tree_.insert(tokens(path).subspan(size_t(from)), std::span(r.table).subspan(size_t(from / bt)), r.chain, locked_);
    REQUIRE(r.chain.broken == broken);
    if (!broken) REQUIRE(compare(path) == rows(path));
  }

  void erase() {
    if (model_.blocks.empty()) return;
    auto at = model_.blocks.begin();
    std::advance(at, ptrdiff_t(random_.below(model_.blocks.size())));
    const int32_t block = at->first;
    const size_t before = model_.blocks.size();
    model_.blocks.erase(at);
    tree_.evict(block);
    deep_ += model_.blocks.size() + 1 < before;
  }

  // Called when the tree drops a block: it followed an erased block, or a longer block contains all of it.
  void lost(int32_t block) {
    const Tokens path = model_.blocks.at(block);
    model_.blocks.erase(block);
    REQUIRE((!model_.reached(path) || model_.backed(path)));
    ++lost_;
  }

  void check() {
    tree_.check_invariants();
    std::set<Tokens> prefixes;
    for (const auto& [block, path] : model_.blocks) {
      REQUIRE(tree_.tokens_in(block) == rows(path) - model_.first_of(path));
      REQUIRE(model_.reached(path));
      for (size_t n = 2; n <= path.size(); ++n) prefixes.emplace(path.begin(), path.begin() + ptrdiff_t(n));
    }
    for (int32_t b = 0; b < kBlocks; ++b) REQUIRE((tree_.tokens_in(b) > 0) == (model_.blocks.count(b) > 0));
    REQUIRE(tree_.size() == int64_t(prefixes.size()));  // each token once, and none without a block
  }

  Model model_;
  Random random_;
  std::vector<PrefixCache::Node> nodes_;
  RadixTree tree_;
  std::vector<Running> running_;
  Tokens asked_;
  int hits_ = 0, within_ = 0, lost_ = 0, deep_ = 0, refused_ = 0;
};

KvOptions radix_options(int block_tokens, int n_blocks) {
  KvOptions o = tiny_options(block_tokens, n_blocks);
  o.radix = true;
  return o;
}

}  // namespace

TEST_CASE("RadixTree: random sequences and erased blocks agree with a plain model", "[allocator][radix]") {
  for (int block_tokens : {1, 2, 4, 7})
    for (uint64_t seed : {1, 2, 3}) {
      CAPTURE(block_tokens, seed);
      TreeTrial(block_tokens, seed).run(4'000);
    }
}

TEST_CASE("radix: a sequence's last block stays when it ends, and the first to continue from it needs no copy",
          "[allocator][radix]") {
  Memory m(radix_options(8, 20));
  const Tokens turn = counting(21);
  m.kv->free(fill(*m.kv, turn, 0).handle);
  CHECK(m.kv->stats().cached == 3);
  const Tokens next = joined(turn, counting(9, 700)), other = joined(turn, counting(9, 800));
  const KvReservation r = m.kv->reserve(next, 0).value(), s = m.kv->reserve(other, 0).value();
  CHECK((r.cached_tokens == 21 && s.cached_tokens == 21));
  CHECK(m.kv->stats().cow_copies == 1);  // for the second one
  CHECK(m.kv->blocks(r.handle).back() != m.kv->blocks(s.handle).back());
  m.kv->free(s.handle);  // the copy has no token of its own, so it becomes free
  CHECK((m.kv->stats().cached == 0 && m.kv->probe(next, 0) == 21));
  extend(*m.kv, r.handle, next, 0);
  m.kv->check_invariants();
  CHECK(wrong_rows(*m.kv, r.handle, next, 0) == 0);
}

TEST_CASE("radix: a block under a lease, which a peer may still write, is not continued in place",
          "[allocator][radix]") {
  Memory m(radix_options(8, 20));
  KvMemory& kv = *m.kv;
  const Tokens turn = counting(21), late = joined(turn, counting(9, 700)), next = joined(turn, counting(9, 800));
  kv.free(fill(kv, turn, 0).handle);

  // A handover is abandoned while its peer's transfers are under way, so the lease stays.
  const KvReservation given_up = kv.reserve(late, 0).value();
  CHECK(given_up.cached_tokens == 21);
  REQUIRE(kv.append(given_up.handle, 9));
  const KvLease lease = kv.pin(given_up.handle);
  KvView place = kv.view(given_up.handle);
  const std::vector<int32_t> table(kv.blocks(given_up.handle).begin(), kv.blocks(given_up.handle).end());
  place.block_table = table.data();
  kv.free(given_up.handle);

  const KvReservation owner = fill(kv, next, 0);
  CHECK(owner.cached_tokens == 21);
  write_rows(place, late, 0, 21);
  CHECK(wrong_rows(kv, owner.handle, next, 0) == 0);
  kv.unpin(lease);
  kv.free(owner.handle);
}

TEST_CASE("radix: leaves are evicted by least recent use from their ends, and never while in use",
          "[allocator][radix]") {
  Memory m(radix_options(4, 12));
  const Tokens head = counting(6), a = joined(head, counting(6, 100)), b = joined(head, counting(6, 200)),
               c = counting(8, 300);
  m.kv->free(fill(*m.kv, a, 0).handle);               // 3 blocks
  const KvHandle running = fill(*m.kv, c, 0).handle;  // 2 blocks
  m.kv->free(fill(*m.kv, b, 0).handle);               // 2 of its own: the first has 2 rows of head, copied
  CHECK((m.kv->stats().cached == 5 && m.kv->stats().free == 5));
  const auto found = [&](const Tokens& t) { return m.kv->probe(joined(t, Tokens{9}), 0); };
  std::vector<KvHandle> wants;
  const auto want = [&](int blocks) {
    const Tokens other = counting(4 * blocks, 1000 * int32_t(1 + wants.size()));
    const KvHandle h = m.kv->reserve(other, 5).value().handle;
    REQUIRE(m.kv->append(h, 4 * blocks));
    wants.push_back(h);
    m.kv->check_invariants();
  };
  want(5);
  CHECK((found(a) == 12 && found(b) == 12 && found(c) == 8));
  want(1);  // a's end goes: it is older than b
  CHECK((found(a) == 8 && found(b) == 12 && found(c) == 8));
  want(1);  // and a's middle: b's block also has its rows of head
  CHECK((found(a) == 6 && found(b) == 12 && found(c) == 8));
  // This uses b's first two blocks.
  m.kv->free(m.kv->reserve(joined(Tokens(b.begin(), b.begin() + 7), Tokens{9}), 0).value().handle);
  want(1);
  CHECK((found(a) == 6 && found(b) == 8 && found(c) == 8));
  want(1);  // rows 4 and 5 of head go with the last block that has them
  CHECK((found(a) == 4 && found(b) == 4 && found(c) == 8));
  want(1);
  CHECK((found(a) == 0 && found(c) == 8 && m.kv->stats().evictions == 5));
  const KvHandle more = m.kv->reserve(counting(4, 9000), 5).value().handle;
  CHECK_FALSE(m.kv->append(more, 4));  // c runs: its blocks and its place in the tree stay
  CHECK(found(c) == 8);
  m.kv->free(running);
  CHECK(m.kv->append(more, 4));
  CHECK(found(c) == 4);
  m.kv->check_invariants();
}

}  // namespace xpyd::testing::radix_tree_test

#include "allocator/prefix/radix_tree.h"

#include <algorithm>
#include <string>

#include "base/status.h"

namespace xpyd::allocator {

RadixTree::RadixTree(int n_blocks, int block_tokens, Node* nodes, size_t node_stride, std::function<void(int32_t)> lost)
    : PrefixCache(1, n_blocks, block_tokens, nodes, node_stride), lost_(std::move(lost)) {}

int RadixTree::tokens_in(int32_t block) const {
  if (node(block).uid == 0) return 0;
  const Edge& of = edge(int32_t(node(block).parent >> 32));
  const int begin = (of.begin / block_tokens_ + int(uint32_t(node(block).parent))) * block_tokens_;
  return std::min(block_tokens_, of.end() - begin);
}

// Returns the end of a chain. A chain ends with a full block; while that block is in the tree, its path is too.
RadixTree::Place RadixTree::end_of(const PrefixChain& chain) const {
  if (chain.broken) return {-1, 0};
  if (chain.first()) {
    const auto root = roots_.find(chain.hash);
    return {root == roots_.end() ? -1 : root->second, 0};
  }
  const Node& last = node(chain.block);
  if (last.uid != chain.uid) return {-1, 0};
  const int32_t id = int32_t(last.parent >> 32);
  return {id, (edge(id).begin / block_tokens_ + int(uint32_t(last.parent)) + 1) * block_tokens_};
}

int32_t RadixTree::child_of(const Edge& from, int32_t token) const {
  const auto at = std::ranges::lower_bound(from.children, token, {}, [](const auto& child) { return child.first; });
  return at != from.children.end() && at->first == token ? at->second : -1;
}

// Follows `tokens` as far as the tree has them, and gives `found` the full blocks that end on the way.
RadixTree::Place RadixTree::descend(Place at, std::span<const int32_t> tokens, const Found* found) const {
  while (!tokens.empty()) {
    const Edge& on = edge(at.edge);
    if (at.depth == on.end()) {
      const int32_t child = child_of(on, tokens[0]);
      if (child < 0) break;
      at.edge = child;
      continue;
    }
    const int most = std::min(int(tokens.size()), on.end() - at.depth);
    const int same = tokens_alike(on.tokens.data() + (at.depth - on.begin), tokens.data(), most);
    const int from = at.depth / block_tokens_, to = (at.depth + same) / block_tokens_;
    if (found && to > from)
      (*found)(std::span(on.blocks).subspan(size_t(from - on.begin / block_tokens_), size_t(to - from)));
    at.depth += same, tokens = tokens.subspan(size_t(same));
    if (same < most) break;
  }
  return at;
}

// Returns a block that has all tokens up to a point within it.
int32_t RadixTree::block_with(Place end) const {
  const int place = end.depth / block_tokens_;
  for (const Edge* on = &edge(end.edge);; on = &edge(on->children[0].second)) {
    const size_t i = size_t(place - on->begin / block_tokens_);
    if (i < on->blocks.size()) return on->blocks[i];
  }
}

// Advances `chain` to the last full block before `end`.
void RadixTree::advance(PrefixChain& chain, Place end) const {
  const int full = end.depth / block_tokens_ * block_tokens_;
  if (full == 0) return;
  while (edge(end.edge).begin >= full) end.edge = edge(end.edge).parent;
  const Edge& on = edge(end.edge);
  chain.block = on.blocks[size_t(full / block_tokens_ - 1 - on.begin / block_tokens_)];
  chain.uid = node(chain.block).uid;
}

int RadixTree::match(std::span<const int32_t> tokens, int max_tokens, PrefixChain& chain, const Locked& locked,
                     const Found& found) const {
  const int at_once = std::max(1, kAtOnce / block_tokens_) * block_tokens_;  // whole blocks: a chain ends with one
  int done = 0, n = 0, same = 0;
  const auto look = [&] {
    same = 0;
    const Place from = end_of(chain);
    if (from.edge < 0) return;
    const Place end = descend(from, tokens.subspan(size_t(done), size_t(n)), &found);
    same = end.depth - done;
    if (end.depth % block_tokens_ != 0) {
      const int32_t last = block_with(end);
      found({&last, 1});
    }
    advance(chain, end);
  };
  while (done < max_tokens) {
    n = std::min(at_once, max_tokens - done);
    locked(std::ref(look));
    done += same;
    if (same < n) break;
  }
  return done;
}

void RadixTree::insert(std::span<const int32_t> tokens, std::span<const int32_t> blocks, PrefixChain& chain,
                       const Locked& locked) {
  const size_t at_once = size_t(std::max(1, kAtOnce / block_tokens_) * block_tokens_);
  const auto grow = [&] {
    Place from = end_of(chain);
    if (from.edge < 0 && chain.first() && !chain.broken) {
      from.edge = roots_[chain.hash] = make_edge(-1, 0);
      edge(from.edge).salt = chain.hash;
    }
    chain.broken = from.edge < 0;
    if (chain.broken) return;
    const std::span<const int32_t> now = tokens.first(std::min(at_once, tokens.size()));
    const int begin = from.depth;
    Place end = descend(from, now, nullptr);
    const size_t known = size_t(end.depth - begin);
    if (known < now.size()) {
      if (end.depth < edge(end.edge).end()) end.edge = split(end.edge, end.depth);
      extend(end, now.subspan(known), blocks.subspan(size_t(end.depth / block_tokens_ - begin / block_tokens_)));
      end = descend(end, now.subspan(known), nullptr);
    }
    advance(chain, end);
  };
  while (!tokens.empty() && !chain.broken) {
    locked(std::ref(grow));
    const size_t n = std::min(at_once, tokens.size());
    tokens = tokens.subspan(n), blocks = blocks.subspan(n / size_t(block_tokens_));
  }
}

int32_t RadixTree::make_edge(int32_t parent, int begin) {
  int32_t id = int32_t(edges_.size());
  if (unused_.empty()) {
    edges_.emplace_back();
  } else {
    id = unused_.back();
    unused_.pop_back();
  }
  edge(id).parent = parent, edge(id).begin = begin;
  return id;
}

void RadixTree::remove_edge(int32_t id) {
  tokens_ -= int64_t(edge(id).tokens.size());
  edge(id) = Edge();
  unused_.push_back(id);
}

// Cuts an edge at `depth`. The edge keeps its lower part; a new edge above it gets the upper part, and is returned.
int32_t RadixTree::split(int32_t id, int depth) {
  const int32_t upper_id = make_edge(edge(id).parent, edge(id).begin);
  Edge &lower = edge(id), &upper = edge(upper_id), &parent = edge(lower.parent);
  const auto cut_at = lower.tokens.begin() + (depth - lower.begin);
  upper.tokens.assign(lower.tokens.begin(), cut_at);
  lower.tokens.erase(lower.tokens.begin(), cut_at);
  const auto full = lower.blocks.begin() + (depth / block_tokens_ - lower.begin / block_tokens_);
  upper.blocks.assign(lower.blocks.begin(), full);
  lower.blocks.erase(lower.blocks.begin(), full);
  std::ranges::lower_bound(parent.children, upper.tokens[0], {}, [](const auto& child) {
    return child.first;
  })->second = upper_id;
  upper.children.emplace_back(lower.tokens[0], id);
  lower.parent = upper_id, lower.begin = depth;
  for (int32_t of : {id, upper_id})
    for (size_t i = 0; i < edge(of).blocks.size(); ++i) node(edge(of).blocks[i]).parent = uint64_t(of) << 32 | i;
  return upper_id;
}

// Appends the next blocks of an edge.
void RadixTree::put(int32_t id, std::span<const int32_t> blocks) {
  std::vector<int32_t>& own = edge(id).blocks;
  for (int32_t block : blocks) {
    XPYD_CHECK(node(block).uid == 0, "block " + std::to_string(block) + " holds other tokens");
    node(block) = {next_uid_++, uint64_t(id) << 32 | own.size()};
    own.push_back(block);
  }
}

// Adds `tokens` after the end of an edge. They lie in `blocks`; the first one also holds the tokens just before them.
void RadixTree::extend(Place from, std::span<const int32_t> tokens, std::span<const int32_t> blocks) {
  const bool leaf = edge(from.edge).children.empty() && edge(from.edge).parent >= 0;
  const size_t first = size_t(from.depth / block_tokens_), past = size_t(from.depth) + tokens.size();
  blocks = blocks.first((past + size_t(block_tokens_) - 1) / size_t(block_tokens_) - first);
  int32_t id = from.edge;
  if (!leaf) {
    id = make_edge(from.edge, from.depth);
    auto& children = edge(from.edge).children;
    children.insert(std::ranges::lower_bound(children, tokens[0], {}, [](const auto& child) { return child.first; }),
                    {tokens[0], id});
  } else if (from.depth % block_tokens_ != 0) {  // the leaf's last block grows, or a longer one replaces it
    std::vector<int32_t>& own = edge(id).blocks;
    if (own.back() == blocks[0]) {
      blocks = blocks.subspan(1);
    } else {
      const int32_t shorter = own.back();
      own.pop_back();
      lose(shorter);
    }
  }
  edge(id).tokens.insert(edge(id).tokens.end(), tokens.begin(), tokens.end());
  tokens_ += int64_t(tokens.size());
  put(id, blocks);
}

void RadixTree::lose(int32_t block) {
  node(block) = {};
  lost_(block);
}

void RadixTree::evict(int32_t block) {
  XPYD_CHECK(node(block).uid != 0, "block " + std::to_string(block));
  const int32_t id = int32_t(node(block).parent >> 32), place = int32_t(uint32_t(node(block).parent));
  node(block) = {};
  cut(id, (edge(id).begin / block_tokens_ + place) * block_tokens_);
}

// Removes everything after token `depth`, the start of a block, from this edge and from the edges below it.
void RadixTree::cut(int32_t id, int depth) {
  std::vector<int32_t> below{id};  // the edge, and those that are removed
  for (size_t i = 0; i < below.size(); ++i)
    for (const auto& [token, child] : edge(below[i]).children) below.push_back(child);
  for (size_t i = below.size(); i-- > 0;) {
    Edge& on = edge(below[i]);
    const size_t keep = i == 0 ? size_t(std::max(0, depth / block_tokens_ - on.begin / block_tokens_)) : 0;
    for (; on.blocks.size() > keep; on.blocks.pop_back())
      if (node(on.blocks.back()).uid != 0) lose(on.blocks.back());  // otherwise it is the block that is being evicted
    if (i > 0) remove_edge(below[i]);
  }
  Edge& on = edge(id);
  on.children.clear();
  const int kept = std::max(0, depth - on.begin);
  tokens_ -= int64_t(on.tokens.size()) - kept;
  if (kept > 0) return on.tokens.resize(size_t(kept));
  // The edge is removed, and so are the tokens of the edges above that only its first block held.
  const int32_t parent = on.parent;
  if (parent < 0) {
    roots_.erase(on.salt);
  } else {
    auto& siblings = edge(parent).children;
    std::erase_if(siblings, [id](const auto& child) { return child.second == id; });
    if (siblings.empty() && (edge(parent).parent < 0 || edge(parent).end() % block_tokens_ != 0))
      cut(parent, edge(parent).end() / block_tokens_ * block_tokens_);
  }
  on.tokens.clear();
  remove_edge(id);
}

void RadixTree::check_invariants() const {
  std::vector<int> seen(size_t(n_blocks_), 0);
  int64_t tokens = 0;
  int used = 0;
  for (int32_t id = 0; id < int32_t(edges_.size()); ++id) {
    const Edge& on = edge(id);
    const std::string which = "edge " + std::to_string(id);
    const bool root = on.parent < 0;
    if (root && on.children.empty()) {
      XPYD_CHECK(on.tokens.empty() && on.blocks.empty() && std::ranges::count(unused_, id) == 1, which);
      continue;
    }
    ++used, tokens += int64_t(on.tokens.size());
    XPYD_CHECK(root == on.tokens.empty() && (!root || (on.begin == 0 && roots_.at(on.salt) == id)), which);
    XPYD_CHECK(root || child_of(edge(on.parent), on.tokens[0]) == id, which);
    XPYD_CHECK(root || edge(on.parent).end() == on.begin, which);
    XPYD_CHECK(std::ranges::is_sorted(on.children), which);
    for (const auto& [token, child] : on.children)
      XPYD_CHECK(edge(child).parent == id && edge(child).tokens[0] == token, which);
    // Rules 1 and 3: full blocks up to the last multiple, and up to the end if nothing continues it.
    const int last = on.children.empty() ? on.end() + block_tokens_ - 1 : on.end();
    XPYD_CHECK(int(on.blocks.size()) == last / block_tokens_ - on.begin / block_tokens_, which);
    for (size_t i = 0; i < on.blocks.size(); ++i) {
      const int32_t block = on.blocks[i];
      XPYD_CHECK(++seen[size_t(block)] == 1 && node(block).uid != 0 && node(block).uid < next_uid_, which);
      XPYD_CHECK(node(block).parent == (uint64_t(id) << 32 | i), which);
    }
  }
  XPYD_CHECK(tokens == tokens_ && used == n_edges());
  for (int32_t block = 0; block < n_blocks_; ++block)
    XPYD_CHECK((node(block).uid != 0) == (seen[size_t(block)] == 1), "block " + std::to_string(block));
}

}  // namespace xpyd::allocator

// Byte-pair encoding of one word (Sennrich et al. 2016), with the order of merges of Hugging Face's
// tokenizers: lowest rank first, leftmost among equals.
//
// Thread safety: const after building; each thread its own Workspace.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace xpyd {

class Bpe {
 public:
  // What a character outside the vocabulary becomes.
  bool byte_level = false;     // there is none: symbols are bytes
  bool byte_fallback = false;  // its UTF-8 bytes, by byte_ids
  int32_t unk = -1;            // -1: none
  bool fuse_unk = false;       // a run of unknown characters is one unk
  bool ignore_merges = false;  // a word that is a token is that token, merges or not
  std::array<int32_t, 256> byte_ids;

  // Bytes of a token as they stand in a word -> id. The keys belong to the caller.
  std::unordered_map<std::string_view, int32_t> ids;
  std::vector<bool> special;  // by id

  void reserve_merges(size_t n);
  // The pair (left, right) becomes `merged`; a repeated pair keeps its last rank.
  void add_merge(int32_t left, int32_t right, uint32_t rank, int32_t merged);

  struct Symbol {
    int32_t id;          // -1: merged into its left neighbour
    int32_t prev, next;  // indices; -1: none
  };
  struct Candidate {
    uint64_t order;  // rank << 32 | index of the left symbol
    int32_t merged;  // id
    int32_t left() const { return static_cast<int32_t>(order); }
  };
  struct Workspace {
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };

  // Appends the ids of `word`, valid UTF-8, in O(n log n). Without allow_special no merge and no
  // whole word makes a special token. A word of a GiB or more is cut.
  void encode(std::string_view word, bool allow_special, Workspace& space, std::vector<int32_t>& out) const;

 private:
  struct Merge {
    uint64_t pair = kEmpty;  // left << 32 | right
    uint32_t rank = 0;
    int32_t merged = -1;
  };
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  Merge& slot(uint64_t pair);
  const Merge* find(int32_t left, int32_t right) const;
  void symbols_of(std::string_view word, std::vector<Symbol>& symbols) const;
  void merge_all(bool allow_special, Workspace& space) const;

  std::vector<Merge> merges_;  // open addressing, at most half full, a power of two
  size_t n_merges_ = 0;
};

}  // namespace xpyd

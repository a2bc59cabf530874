// The contents of a Tokenizer. tokenizer_load.cc fills it; tokenizer.cc and tokenizer_bpe.cc read it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/text/pretokenize.h"
#include "model/text/tokenizer.h"

namespace xpyd::model {

// Added tokens are found in the text before BPE, leftmost and longest first.
//
// Thread safety: const after building.
struct AddedToken {
  int32_t id = -1;
  std::string content;
  bool special = false;
};

class AddedTokens {
 public:
  void add(const AddedToken& token);

  struct Piece {
    size_t begin, end;  // in the text; never empty
    int32_t id;         // -1: text between tokens
  };
  // No token crosses a border, which is an offset in the text.
  std::vector<Piece> split(std::string_view text, const std::vector<size_t>& borders) const;
  // Returns the longest token, or special token, at the beginning of a text, or null.
  const AddedToken* find(std::string_view text, bool only_special) const;

 private:
  std::map<std::string, AddedToken, std::less<>> tokens_;  // by content
  std::set<size_t, std::greater<>> lengths_;               // of their contents
  std::array<bool, 256> begins_ = {};                      // true if a content begins with this byte
};

// Byte-pair encoding of one word (Sennrich et al. 2016). Merges are in the order of Hugging Face's tokenizers: lowest
// rank first, leftmost among equals.
//
// Thread safety: const after building; each thread has its own Workspace.
class Bpe {
 public:
  bool byte_level = false;            // symbols are bytes; else characters, and the bytes of unknown characters
  bool ignore_merges = false;         // a word that is a token becomes that token without merges
  std::array<int32_t, 256> byte_ids;

  // A token's bytes as they stand in a word -> id. The caller owns the keys.
  std::unordered_map<std::string_view, int32_t> ids;
  std::vector<bool> special;  // by id

  // Makes the pair (left, right) merge to `merged`. A repeated pair keeps its last rank.
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

  // Appends the ids of `word`, valid UTF-8, in O(n log n). Without allow_special, no merge and no whole word makes a
  // special token. Words of more than a GiB are cut.
  void encode(std::string_view word, bool allow_special, Workspace& space, std::vector<int32_t>& out) const;

 private:
  struct Merge {
    uint32_t rank;
    int32_t merged;
  };
  const Merge* find(int32_t left, int32_t right) const;
  void symbols_of(std::string_view word, std::vector<Symbol>& symbols) const;
  void merge_all(bool allow_special, Workspace& space) const;

  std::unordered_map<uint64_t, Merge> merges_;  // by left << 32 | right
};

// Bounds on a tokenizer.json; the largest published ones use less than a third of each. With them, loading takes at
// most about 120 bytes per JSON value plus 200 MB.
inline constexpr size_t kMaxTokenizerBytes = size_t{128} << 20;
inline constexpr int64_t kMaxTokenId = (int64_t{1} << 20) - 1;
inline constexpr size_t kMaxAddedTokens = size_t{1} << 17;
inline constexpr size_t kMaxSteps = 16;  // of a normalizer, pre-tokenizer, decoder, post-processor

struct Tokenizer::Impl {
  struct Token {
    std::string content;      // as in tokenizer.json
    std::string piece;        // its bytes in decoded text
    bool known = false;       // false: unused id
    bool special = false;
    bool is_byte = false;  // "<0x41>", if the decoder has byte fallback
  };
  std::vector<Token> tokens;  // by id; must not grow once by_content and bpe.ids hold views of it
  std::unordered_map<std::string_view, int32_t> by_content;

  AddedTokens added;
  std::vector<NormalizerStep> normalizer;
  std::vector<PreTokenizerStep> pre_tokenizer;
  Bpe bpe;
  std::vector<int32_t> prefix, suffix;  // tokens that the post-processor adds

  struct Decoder {
    bool byte_level = false;  // pieces are bytes of one stream; else each is text of its own
    bool byte_fallback = false;
    bool strip_space = false;  // removes one space from the beginning of the text
  } decoder;

  // `borders` are where marks of guard() were.
  std::vector<int32_t> encode(std::string_view text, const std::vector<size_t>& borders,
                              bool add_special_tokens) const;
};

// Fills `out` from a tokenizer.json; error messages begin with `file`.
Status load_tokenizer(std::string_view json_text, const std::string& file, Tokenizer::Impl& out);

}  // namespace xpyd::model

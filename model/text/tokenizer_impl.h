// The contents of a Tokenizer. tokenizer_load.cc fills it; tokenizer.cc and tokenizer_bpe.cc read it.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
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
  bool single_word = false;  // only if no \w is beside it
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space after it
  bool normalized = false;   // matches normalized text
};

class AddedTokens {
 public:
  // Adds a token that `pattern` (not empty) finds. A second token with the same pattern is never found.
  void add(const AddedToken& token, std::string_view pattern);

  struct Piece {
    size_t begin,
        end;     // in the text; never empty, except if two strips take the same space
    int32_t id;  // -1: text between tokens
  };
  // Consecutive parts of the text; the last one ends with it. A token never crosses a border, although its strips look
  // across. Special tokens are found only in parts that allow them.
  struct Part {
    size_t end;
    bool parse_special;
  };
  void split(std::string_view text, const std::vector<Part>& parts, std::vector<Piece>& out) const;

  bool empty() const { return tokens_.empty(); }
  bool any_special() const;

 private:
  // Returns the index of the token with the longest pattern at `at`, or -1.
  int32_t longest(std::string_view text, size_t at, size_t* bytes) const;

  std::vector<AddedToken> tokens_;
  // Trie from node 0: (node << 8 | byte) -> node; and the token that ends at each node.
  std::unordered_map<uint64_t, uint32_t> edges_;
  std::vector<int32_t> ends_ = {-1};
  std::array<bool, 256> begins_ = {};  // true if a pattern begins with this byte
};

// Byte-pair encoding of one word (Sennrich et al. 2016). Merges are in the order of Hugging Face's tokenizers: lowest
// rank first, leftmost among equals.
//
// Thread safety: const after building; each thread has its own Workspace.
class Bpe {
 public:
  // How characters outside the vocabulary are encoded.
  bool byte_level = false;     // all symbols are bytes, so there are none
  bool byte_fallback = false;  // as UTF-8 bytes, by byte_ids
  int32_t unk = -1;            // -1: none
  bool fuse_unk = false;       // a run of unknown characters is one unk
  bool ignore_merges = false;  // a word that is a token becomes that token without merges
  std::array<int32_t, 256> byte_ids;

  // A token's bytes as they stand in a word -> id. The caller owns the keys.
  std::unordered_map<std::string_view, int32_t> ids;
  std::vector<bool> special;  // by id

  void reserve_merges(size_t n);
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
    uint64_t pair = kEmpty;  // left << 32 | right
    uint32_t rank = 0;
    int32_t merged = -1;
  };
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  Merge& slot(uint64_t pair);
  const Merge* find(int32_t left, int32_t right) const;
  void symbols_of(std::string_view word, std::vector<Symbol>& symbols) const;
  void merge_all(bool allow_special, Workspace& space) const;

  std::vector<Merge> merges_;  // open addressing, at most half full; the size is a power of two
  size_t n_merges_ = 0;
};

// Bounds on a tokenizer.json; the largest published ones use less than a third of each. With them, loading takes at
// most about 120 bytes per JSON value plus 200 MB.
inline constexpr size_t kMaxTokenizerBytes = size_t{128} << 20;
inline constexpr int64_t kMaxTokenId = (int64_t{1} << 20) - 1;
inline constexpr size_t kMaxAddedTokens = size_t{1} << 17;
inline constexpr size_t kMaxAddedTokenBytes = 1024;
inline constexpr size_t kMaxSteps = 16;  // of a normalizer, pre-tokenizer, decoder, post-processor

struct Tokenizer::Impl {
  struct Token {
    std::string content;      // as in tokenizer.json
    std::string piece;        // its bytes in decoded text
    std::string first_piece;  // `piece` at the beginning of a text, if Decoder::strip_first_token
    bool known = false;       // false: unused id
    bool special = false;
    bool is_byte = false;  // "<0x41>", if the decoder has byte fallback
  };
  std::vector<Token> tokens;  // by id; must not grow once by_content and bpe.ids hold views of it
  std::unordered_map<std::string_view, int32_t> by_content;
  std::deque<std::string> keys;  // keys of bpe.ids that are no token's piece or content

  AddedTokens added;             // found in the original text
  AddedTokens added_normalized;  // found in normalized text between those
  std::vector<NormalizerStep> normalizer;
  std::vector<PreTokenizerStep> pre_tokenizer;
  Bpe bpe;
  std::vector<int32_t> prefix, suffix;  // tokens that the post-processor adds

  struct Decoder {
    bool byte_level = false;  // pieces are bytes of one stream; else each is text of its own
    bool byte_fallback = false;
    bool strip_space = false;  // removes one space from the beginning of the text
    // Metaspace's decoder: the first token loses every replacement character.
    bool strip_first_token = false;
    std::string replacement;
  } decoder;

  std::vector<int32_t> encode(std::string_view text, const std::vector<AddedTokens::Part>& parts,
                              bool add_special_tokens) const;
  // Encodes text between added tokens. `parts` covers it.
  void encode_segment(std::string_view text, const std::vector<AddedTokens::Part>& parts, bool at_start,
                      Matching& matching, Bpe::Workspace& space, std::vector<int32_t>& out) const;
};

// Fills `out` from a tokenizer.json; error messages begin with `file`.
Status load_tokenizer(std::string_view json_text, const std::string& file, Tokenizer::Impl& out);

}  // namespace xpyd::model

// What a Tokenizer holds: filled by tokenizer_load.cc, read by tokenizer.cc and tokenizer_bpe.cc.
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

// Added tokens: found in the text before BPE sees it, leftmost and longest first.
//
// Thread safety: const after building.
struct AddedToken {
  int32_t id = -1;
  std::string content;
  bool special = false;
  bool single_word = false;  // only where no \w stands beside it
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // and after it
  bool normalized = false;   // looked for in normalized text
};

class AddedTokens {
 public:
  // `pattern` (not empty) is what to look for. A second token with the same pattern is never found.
  void add(const AddedToken& token, std::string_view pattern);

  struct Piece {
    size_t begin,
        end;     // of the text; never empty, except that strips may take a neighbour's space twice
    int32_t id;  // -1: text between tokens
  };
  // The text's parts, one after the other; the last one ends with it. No token is found across a
  // border (its strips do look across), and special ones only where the part allows them.
  struct Part {
    size_t end;
    bool parse_special;
  };
  void split(std::string_view text, const std::vector<Part>& parts, std::vector<Piece>& out) const;

  bool empty() const { return tokens_.empty(); }
  bool any_special() const;

 private:
  // The longest pattern that begins at `at`: its token's index, or -1.
  int32_t longest(std::string_view text, size_t at, size_t* bytes) const;

  std::vector<AddedToken> tokens_;
  // A trie: (node << 8 | byte) -> node, from node 0; and which token ends at a node.
  std::unordered_map<uint64_t, uint32_t> edges_;
  std::vector<int32_t> ends_ = {-1};
  std::array<bool, 256> begins_ = {};  // some pattern begins with this byte
};

// Byte-pair encoding of one word (Sennrich et al. 2016), with the order of merges of Hugging Face's
// tokenizers: lowest rank first, leftmost among equals.
//
// Thread safety: const after building; each thread its own Workspace.
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

// Bounds on what a tokenizer.json may ask for; the largest published ones stay below a third of
// each. With these, loading takes at most about 120 bytes for each JSON value plus 200 MB.
inline constexpr size_t kMaxTokenizerBytes = size_t{128} << 20;
inline constexpr size_t kMaxTokenizerValues = size_t{4} << 20;
inline constexpr int64_t kMaxTokenId = (int64_t{1} << 20) - 1;
inline constexpr size_t kMaxAddedTokens = size_t{1} << 17;
inline constexpr size_t kMaxAddedTokenBytes = 1024;
inline constexpr size_t kMaxSteps = 16;  // of a normalizer, pre-tokenizer, decoder, post-processor

struct Tokenizer::Impl {
  struct Token {
    std::string content;      // as in tokenizer.json
    std::string piece;        // its bytes in decoded text
    std::string first_piece;  // the same at the text's beginning, where Decoder::strip_first_token
    bool known = false;       // false: a hole among the ids
    bool special = false;
    bool is_byte = false;  // "<0x41>", and the decoder has byte fallback
  };
  std::vector<Token> tokens;  // by id; does not grow once by_content and bpe.ids look into it
  std::unordered_map<std::string_view, int32_t> by_content;
  std::deque<std::string> keys;  // of bpe.ids, where it is no token's piece or content

  AddedTokens added;             // looked for in the text as it is
  AddedTokens added_normalized;  // and between those in normalized text
  std::vector<NormalizerStep> normalizer;
  std::vector<PreTokenizerStep> pre_tokenizer;
  Bpe bpe;
  std::vector<int32_t> prefix, suffix;  // what the post-processor adds

  struct Decoder {
    bool byte_level = false;  // pieces are bytes of one stream; else each is text of its own
    bool byte_fallback = false;
    bool strip_space = false;  // one space from the beginning of the text
    // The first token loses every replacement character: Metaspace's decoder.
    bool strip_first_token = false;
    std::string replacement;
  } decoder;

  std::vector<int32_t> encode(std::string_view text, const std::vector<AddedTokens::Part>& parts,
                              bool add_special_tokens) const;
  // Text between added tokens. `parts` covers it.
  void encode_segment(std::string_view text, const std::vector<AddedTokens::Part>& parts, bool at_start,
                      Matching& matching, Bpe::Workspace& space, std::vector<int32_t>& out) const;
};

// Fills `out` from a tokenizer.json; messages begin with `file`.
Status load_tokenizer(std::string_view json_text, const std::string& file, Tokenizer::Impl& out);

}  // namespace xpyd::model

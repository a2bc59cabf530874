// Added tokens: found in the text before BPE sees it, leftmost and longest first.
//
// Thread safety: const after building.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace xpyd {

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

}  // namespace xpyd

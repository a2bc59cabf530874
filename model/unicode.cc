#include "model/unicode.h"

#include <algorithm>
#include <vector>

#include "base/utf8.h"

namespace xpyd::unicode {
namespace {

// The range that holds c, or nullptr.
template <class R>
const R* find_range(std::span<const R> ranges, uint32_t c) {
  auto at = std::lower_bound(ranges.begin(), ranges.end(), c,
                             [](const R& range, uint32_t value) { return range.last < value; });
  return at != ranges.end() && at->first <= c ? &*at : nullptr;
}

// Hangul syllables are composed by arithmetic: Unicode Standard, section 3.12.
constexpr uint32_t kL = 0x1100, kV = 0x1161, kT = 0x11a7, kS = 0xac00;
constexpr uint32_t kLCount = 19, kVCount = 21, kTCount = 28, kSCount = kLCount * kVCount * kTCount;

struct Mark {
  uint32_t code_point;
  uint8_t combining_class;
};

uint8_t combining_class(uint32_t c) {
  if (c < 0x300) return 0;
  const ClassRange* range = find_range(combining_classes, c);
  return range == nullptr ? 0 : range->combining_class;
}

void decompose(uint32_t c, std::vector<Mark>& out) {
  if (c < 0xc0) {
    out.push_back({c, 0});
    return;
  }
  if (c >= kS && c < kS + kSCount) {
    uint32_t s = c - kS;
    out.push_back({kL + s / (kVCount * kTCount), 0});
    out.push_back({kV + s % (kVCount * kTCount) / kTCount, 0});
    if (s % kTCount != 0) out.push_back({kT + s % kTCount, 0});
    return;
  }
  auto at = std::lower_bound(decompositions.begin(), decompositions.end(), c,
                             [](const Decomposition& entry, uint32_t value) { return entry.composed < value; });
  if (at == decompositions.end() || at->composed != c) {
    out.push_back({c, combining_class(c)});
    return;
  }
  decompose(at->first, out);
  if (at->second != 0) decompose(at->second, out);
}

uint32_t compose(uint32_t a, uint32_t b) {  // 0: they do not
  if (a - kL < kLCount && b - kV < kVCount) return kS + ((a - kL) * kVCount + (b - kV)) * kTCount;
  if (a - kS < kSCount && (a - kS) % kTCount == 0 && b - kT - 1 < kTCount - 1) return a + (b - kT);
  auto key = [](uint16_t i) { return uint64_t{decompositions[i].first} << 32 | decompositions[i].second; };
  uint64_t wanted = uint64_t{a} << 32 | b;
  auto at = std::lower_bound(compositions.begin(), compositions.end(), wanted,
                             [&](uint16_t i, uint64_t value) { return key(i) < value; });
  return at != compositions.end() && key(*at) == wanted ? decompositions[*at].composed : 0;
}

}  // namespace

bool is_letter(uint32_t c) {
  if (c < 0x80) return (c | 0x20) - 'a' < 26;
  return find_range(letters, c) != nullptr;
}
bool is_number(uint32_t c) {
  if (c < 0x80) return c - '0' < 10;
  return find_range(numbers, c) != nullptr;
}
bool is_space(uint32_t c) {
  if (c < 0x80) return c == ' ' || c - '\t' < 5;
  return find_range(white_space, c) != nullptr;
}
bool is_word(uint32_t c) { return find_range(word, c) != nullptr; }

std::string nfc(std::string_view text) {
  // Below U+0300 nothing composes and nothing decomposes in form C.
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<uint8_t>(c) < 0xcc; }))
    return std::string(text);
  std::vector<Mark> marks;
  marks.reserve(text.size());
  for (std::string_view rest = text; !rest.empty();) {
    CodePoint c = next_code_point(rest);
    decompose(c.value, marks);
    rest.remove_prefix(c.bytes);
  }
  // Canonical order: within each run of marks, by combining class, else as they came.
  for (auto at = marks.begin(); at != marks.end();) {
    auto starter = [](const Mark& mark) { return mark.combining_class == 0; };
    auto first = std::find_if_not(at, marks.end(), starter);
    at = std::find_if(first, marks.end(), starter);
    std::stable_sort(first, at, [](const Mark& a, const Mark& b) { return a.combining_class < b.combining_class; });
  }
  // A mark joins the last starter unless a mark of its class or higher stays between them.
  std::vector<Mark> out;
  out.reserve(marks.size());
  size_t starter = 0;  // index in out
  bool has_starter = false;
  for (const Mark& mark : marks) {
    if (has_starter) {
      bool adjacent = starter + 1 == out.size();
      bool blocked = !adjacent && out.back().combining_class >= mark.combining_class;
      uint32_t joined = blocked ? 0 : compose(out[starter].code_point, mark.code_point);
      if (joined != 0) {
        out[starter].code_point = joined;
        continue;
      }
    }
    if (mark.combining_class == 0) starter = out.size(), has_starter = true;
    out.push_back(mark);
  }
  std::string result;
  result.reserve(text.size());
  for (const Mark& mark : out) append_utf8(result, mark.code_point);
  return result;
}

}  // namespace xpyd::unicode

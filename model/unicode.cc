// Uses libutf8proc, and removes characters newer than Unicode 9.0 from normalization.
#include "model/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

#include "base/utf8.h"

namespace xpyd::model::unicode {
namespace {

struct Range {
  uint32_t first, last;  // inclusive
};
template <size_t n>
bool among(const Range (&sorted)[n], uint32_t c) {
  const Range* at = std::lower_bound(sorted, sorted + n, c,
                                     [](const Range& r, uint32_t value) { return r.last < value; });
  return at != sorted + n && at->first <= c;
}

// Characters added between 9.0 and 16.0 that have a combining class or take part in a decomposition. U+11A7 is here
// because utf8proc mistakes it for a trailing consonant.
constexpr Range kNotNormalized[] = {
    {0x07fd, 0x07fd},   {0x0897, 0x089f},   {0x08ca, 0x08d3},   {0x09fe, 0x09fe},   {0x0c3c, 0x0c3c},
    {0x0d3b, 0x0d3c},   {0x0eba, 0x0eba},   {0x11a7, 0x11a7},   {0x1715, 0x1715},   {0x1abf, 0x1ace},
    {0x1df6, 0x1dfa},   {0xa82c, 0xa82c},   {0x105c0, 0x105f3}, {0x10d24, 0x10d27}, {0x10d69, 0x10d6d},
    {0x10eab, 0x10eac}, {0x10efc, 0x10eff}, {0x10f46, 0x10f50}, {0x10f82, 0x10f85}, {0x11070, 0x11070},
    {0x1133b, 0x1133b}, {0x11380, 0x113e2}, {0x1145e, 0x1145e}, {0x11839, 0x1183a}, {0x11930, 0x11930},
    {0x11938, 0x11938}, {0x1193d, 0x1193e}, {0x11943, 0x11943}, {0x119e0, 0x119e0}, {0x11a34, 0x11a34},
    {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d42}, {0x11d44, 0x11d45}, {0x11d97, 0x11d97},
    {0x11f41, 0x11f42}, {0x16100, 0x1612f}, {0x16d40, 0x16d79}, {0x16ff0, 0x16ff1}, {0x1e08f, 0x1e08f},
    {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef}, {0x1e4ec, 0x1e4ef}, {0x1e5d0, 0x1e5ff},
};

int combining_class(utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; }

// Canonical order: sorts each run of marks stably by combining class. (utf8proc takes quadratic time.)
void order_marks(std::vector<utf8proc_int32_t>& text) {
  auto starter = [](utf8proc_int32_t c) { return combining_class(c) == 0; };
  for (auto at = text.begin(); at != text.end();) {
    auto first = std::find_if_not(at, text.end(), starter);
    at = std::find_if(first, text.end(), starter);
    std::stable_sort(first, at, [](auto a, auto b) { return combining_class(a) < combining_class(b); });
  }
}

}  // namespace

std::string nfc(std::string_view text) {
  // Form C neither composes nor decomposes characters below U+0300.
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<uint8_t>(c) < 0xcc; }))
    return std::string(text);
  std::string result;
  result.reserve(text.size());
  std::vector<utf8proc_int32_t> run;  // decomposed
  auto end_run = [&] {
    order_marks(run);
    run.resize(size_t(utf8proc_normalize_utf32(run.data(), utf8proc_ssize_t(run.size()),
                                               utf8proc_option_t(UTF8PROC_COMPOSE | UTF8PROC_STABLE))));
    for (utf8proc_int32_t c : run) append_utf8(result, uint32_t(c));
    run.clear();
  };
  for (std::string_view rest = text; !rest.empty();) {
    const CodePoint c = next_code_point(rest);
    rest.remove_prefix(size_t(c.bytes));
    if (c.value < 0xc0) {
      run.push_back(utf8proc_int32_t(c.value));
      continue;
    }
    // A starter that composes with nothing separates the characters before and after it.
    if (among(kNotNormalized, c.value)) {
      end_run();
      append_utf8(result, c.value);
      continue;
    }
    utf8proc_int32_t parts[8];
    const auto n = utf8proc_decompose_char(utf8proc_int32_t(c.value), parts, 8, UTF8PROC_DECOMPOSE, nullptr);
    run.insert(run.end(), parts, parts + n);
  }
  end_run();
  return result;
}

}  // namespace xpyd::model::unicode

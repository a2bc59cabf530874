#include "model/text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cstdint>
#include <new>

#include "base/status.h"
#include "base/utf8.h"

namespace xpyd::model {
namespace pcre2 {  // named, because Regex holds these

struct Free {
  void operator()(pcre2_code* p) const { pcre2_code_free(p); }
  void operator()(pcre2_match_context* p) const { pcre2_match_context_free(p); }
  void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
  void operator()(pcre2_jit_stack* p) const { pcre2_jit_stack_free(p); }
};
template <class T>
using Held = std::unique_ptr<T, Free>;

inline PCRE2_SPTR units(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

// What a thread needs for its matches.
struct Space {
  Space() {
    if (!stack || !data || !context) throw std::bad_alloc();
    pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
    pcre2_set_heap_limit(context.get(), 64 << 10);  // KiB, of the interpreter
  }
  Held<pcre2_jit_stack> stack{pcre2_jit_stack_create(32 << 10, 512 << 10, nullptr)};
  Held<pcre2_match_data> data{pcre2_match_data_create(1, nullptr)};
  Held<pcre2_match_context> context{pcre2_match_context_create(nullptr)};
};

inline Space& space() {
  thread_local Space mine;
  return mine;
}

}  // namespace pcre2

struct Regex::Code {
  pcre2::Held<pcre2_code> compiled;
  bool jit = false;
};

Regex::Regex(std::string_view pattern, std::string where) : code_(std::make_unique<Code>()), where_(std::move(where)) {
  int error = 0;
  size_t at = 0;
  // Ruby's ^ and $ match at lines. A match is anchored to one place; cut() moves on.
  code_->compiled.reset(pcre2_compile(pcre2::units(pattern), pattern.size(),
                                      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_ANCHORED, &error, &at, nullptr));
  if (!code_->compiled) {
    char text[256];
    pcre2_get_error_message(error, reinterpret_cast<PCRE2_UCHAR*>(text), sizeof text);
    throw invalid(where_ + ": this is not a valid regular expression: " + text);
  }
  code_->jit = pcre2_jit_compile(code_->compiled.get(), PCRE2_JIT_COMPLETE) == 0;  // else it is interpreted
}

Regex::~Regex() = default;

size_t Regex::match_at(std::string_view text, size_t at) const {
  const pcre2_code* code = code_->compiled.get();
  pcre2::Space& space = pcre2::space();
  int found = PCRE2_ERROR_JIT_STACKLIMIT;
  if (code_->jit)
    found = pcre2_jit_match(code, pcre2::units(text), text.size(), at, 0, space.data.get(), space.context.get());
  if (found == PCRE2_ERROR_JIT_STACKLIMIT)
    found = pcre2_match(code, pcre2::units(text), text.size(), at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, space.data.get(),
                        space.context.get());
  if (found == PCRE2_ERROR_NOMATCH) return std::string_view::npos;
  if (found < 0)
    throw invalid(where_ + ": the regular expression takes too much time or memory on a text of " +
                  std::to_string(text.size()) + " bytes");
  return pcre2_get_ovector_pointer(space.data.get())[1];
}

void Regex::cut(std::string_view text, std::vector<Piece>& out) const {
  out.clear();
  if (text.empty()) return;
  // Backtracking from the end of a long run of spaces takes one step per space.
  const size_t limit = std::min<size_t>(1'000'000 + 4 * text.size(), UINT32_MAX);
  pcre2_set_match_limit(pcre2::space().context.get(), static_cast<uint32_t>(limit));
  size_t done = 0;
  bool any = false;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = match_at(text, at);
    // No empty match follows another match directly.
    if (end == text.npos || (end == at && any && done == at)) {
      at += at < text.size() ? size_t(next_code_point(text.substr(at)).bytes) : 1;
      continue;
    }
    if (done < at) out.push_back({done, at, false});
    out.push_back({at, end, true});
    at = done = end;
    any = true;
  }
  if (done < text.size()) out.push_back({done, text.size(), false});
}

}  // namespace xpyd::model

#include "model/text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <new>

#include "base/numbers.h"
#include "base/status.h"
#include "base/utf8.h"

namespace xpyd::model {
namespace {

constexpr size_t kMaxRegexBytes = size_t{16} << 10;

// ---- From Oniguruma's syntax to PCRE2's

// Letters, marks, numbers, punctuation and symbols that Unicode 15.0 to 16.0 added to 14.0, which Debian 12's PCRE2
// has. The list is what tokenizers 0.23 matches and Unicode 14.0's table lacks. A PCRE2 with Unicode 15 knows some of
// them already, which does no harm.
struct Newer {
  uint32_t first, last;
  const char* category;
};
constexpr Newer kNewer[] = {
    {0x897, 0x897, "Mn"},     {0xcf3, 0xcf3, "Mc"},     {0xece, 0xece, "Mn"},     {0x1b4e, 0x1b4f, "Po"},
    {0x1b7f, 0x1b7f, "Po"},   {0x1c89, 0x1c89, "Lu"},   {0x1c8a, 0x1c8a, "Ll"},   {0x2427, 0x2429, "So"},
    {0x2ffc, 0x2fff, "So"},   {0x31e4, 0x31e5, "So"},   {0x31ef, 0x31ef, "So"},   {0xa7cb, 0xa7cc, "Lu"},
    {0xa7cd, 0xa7cd, "Ll"},   {0xa7da, 0xa7da, "Lu"},   {0xa7db, 0xa7db, "Ll"},   {0xa7dc, 0xa7dc, "Lu"},
    {0x105c0, 0x105f3, "Lo"}, {0x10d40, 0x10d49, "Nd"}, {0x10d4a, 0x10d4d, "Lo"}, {0x10d4e, 0x10d4e, "Lm"},
    {0x10d4f, 0x10d4f, "Lo"}, {0x10d50, 0x10d65, "Lu"}, {0x10d69, 0x10d6d, "Mn"}, {0x10d6e, 0x10d6e, "Pd"},
    {0x10d6f, 0x10d6f, "Lm"}, {0x10d70, 0x10d85, "Ll"}, {0x10d8e, 0x10d8f, "Sm"}, {0x10ec2, 0x10ec4, "Lo"},
    {0x10efc, 0x10eff, "Mn"}, {0x1123f, 0x11240, "Lo"}, {0x11241, 0x11241, "Mn"}, {0x11380, 0x11389, "Lo"},
    {0x1138b, 0x1138b, "Lo"}, {0x1138e, 0x1138e, "Lo"}, {0x11390, 0x113b5, "Lo"}, {0x113b7, 0x113b7, "Lo"},
    {0x113b8, 0x113ba, "Mc"}, {0x113bb, 0x113c0, "Mn"}, {0x113c2, 0x113c2, "Mc"}, {0x113c5, 0x113c5, "Mc"},
    {0x113c7, 0x113ca, "Mc"}, {0x113cc, 0x113cd, "Mc"}, {0x113ce, 0x113ce, "Mn"}, {0x113cf, 0x113cf, "Mc"},
    {0x113d0, 0x113d0, "Mn"}, {0x113d1, 0x113d1, "Lo"}, {0x113d2, 0x113d2, "Mn"}, {0x113d3, 0x113d3, "Lo"},
    {0x113d4, 0x113d5, "Po"}, {0x113d7, 0x113d8, "Po"}, {0x113e1, 0x113e2, "Mn"}, {0x116d0, 0x116e3, "Nd"},
    {0x1171e, 0x1171e, "Mc"}, {0x11b00, 0x11b09, "Po"}, {0x11bc0, 0x11be0, "Lo"}, {0x11be1, 0x11be1, "Po"},
    {0x11bf0, 0x11bf9, "Nd"}, {0x11f00, 0x11f01, "Mn"}, {0x11f02, 0x11f02, "Lo"}, {0x11f03, 0x11f03, "Mc"},
    {0x11f04, 0x11f10, "Lo"}, {0x11f12, 0x11f33, "Lo"}, {0x11f34, 0x11f35, "Mc"}, {0x11f36, 0x11f3a, "Mn"},
    {0x11f3e, 0x11f3f, "Mc"}, {0x11f40, 0x11f40, "Mn"}, {0x11f41, 0x11f41, "Mc"}, {0x11f42, 0x11f42, "Mn"},
    {0x11f43, 0x11f4f, "Po"}, {0x11f50, 0x11f59, "Nd"}, {0x11f5a, 0x11f5a, "Mn"}, {0x1342f, 0x1342f, "Lo"},
    {0x13440, 0x13440, "Mn"}, {0x13441, 0x13446, "Lo"}, {0x13447, 0x13455, "Mn"}, {0x13460, 0x143fa, "Lo"},
    {0x16100, 0x1611d, "Lo"}, {0x1611e, 0x16129, "Mn"}, {0x1612a, 0x1612c, "Mc"}, {0x1612d, 0x1612f, "Mn"},
    {0x16130, 0x16139, "Nd"}, {0x16d40, 0x16d42, "Lm"}, {0x16d43, 0x16d6a, "Lo"}, {0x16d6b, 0x16d6c, "Lm"},
    {0x16d6d, 0x16d6f, "Po"}, {0x16d70, 0x16d79, "Nd"}, {0x18cff, 0x18cff, "Lo"}, {0x1b132, 0x1b132, "Lo"},
    {0x1b155, 0x1b155, "Lo"}, {0x1cc00, 0x1ccef, "So"}, {0x1ccf0, 0x1ccf9, "Nd"}, {0x1cd00, 0x1ceb3, "So"},
    {0x1d2c0, 0x1d2d3, "No"}, {0x1df25, 0x1df2a, "Ll"}, {0x1e030, 0x1e06d, "Lm"}, {0x1e08f, 0x1e08f, "Mn"},
    {0x1e4d0, 0x1e4ea, "Lo"}, {0x1e4eb, 0x1e4eb, "Lm"}, {0x1e4ec, 0x1e4ef, "Mn"}, {0x1e4f0, 0x1e4f9, "Nd"},
    {0x1e5d0, 0x1e5ed, "Lo"}, {0x1e5ee, 0x1e5ef, "Mn"}, {0x1e5f0, 0x1e5f0, "Lo"}, {0x1e5f1, 0x1e5fa, "Nd"},
    {0x1e5ff, 0x1e5ff, "Po"}, {0x1f6dc, 0x1f6dc, "So"}, {0x1f774, 0x1f776, "So"}, {0x1f77b, 0x1f77f, "So"},
    {0x1f7d9, 0x1f7d9, "So"}, {0x1f8b2, 0x1f8bb, "So"}, {0x1f8c0, 0x1f8c1, "So"}, {0x1fa75, 0x1fa77, "So"},
    {0x1fa87, 0x1fa89, "So"}, {0x1fa8f, 0x1fa8f, "So"}, {0x1faad, 0x1faaf, "So"}, {0x1fabb, 0x1fabf, "So"},
    {0x1fac6, 0x1fac6, "So"}, {0x1face, 0x1facf, "So"}, {0x1fada, 0x1fadc, "So"}, {0x1fadf, 0x1fadf, "So"},
    {0x1fae8, 0x1fae9, "So"}, {0x1faf7, 0x1faf8, "So"}, {0x1fbcb, 0x1fbef, "So"}, {0x2b739, 0x2b739, "Lo"},
    {0x2ebf0, 0x2ee5d, "Lo"}, {0x31350, 0x323af, "Lo"},
};
constexpr Newer kNewerHan[] = {{0x2ebf0, 0x2ee5d, "Han"}, {0x31350, 0x323af, "Han"}};
constexpr std::string_view kCategories =
    " L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp C Cc Cf Cs Co Cn ";
// White_Space; PCRE2's \s also has U+180E.
constexpr const char* kSpaces =
    R"(\t-\r \x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
// Alphabetic, marks, decimal digits and connectors. Outside of [], Oniguruma also has six numbers of Latin-1.
constexpr const char* kWords =
    R"(\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{24b6}-\x{24e9}\x{1f130}-\x{1f149}\x{1f150}-\x{1f169}\x{1f170}-\x{1f189})";
constexpr const char* kLatin1Numbers = R"(\x{b2}\x{b3}\x{b9}\x{bc}-\x{be})";

std::string escape_of(uint32_t c) {
  char text[16];
  std::snprintf(text, sizeof text, "\\x{%x}", c);
  return text;
}
void add_range(std::string& out, uint32_t first, uint32_t last) {
  out += escape_of(first);
  if (last > first) out += "-" + escape_of(last);
}
// True if PCRE2's tables are older than kNewer.
bool lacks_newer() {
  char version[64] = "";
  return pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, version) < int(sizeof version) && std::atoi(version) < 16;
}
// Returns the part of a class that PCRE2's property lacks. `category`: one letter, or two.
std::string newer_of(std::string_view category) {
  static const bool lacks = lacks_newer();
  std::string out;
  const Newer* end = lacks ? std::end(kNewer) : std::begin(kNewer);
  for (const Newer* range = kNewer; range < end;) {
    const uint32_t first = range->first;
    uint32_t next = first;
    for (; range < end && (next == first || range->first == next); ++range) {  // adjacent ranges become one
      if (!std::string_view(range->category).starts_with(category)) break;
      next = range->last + 1;
    }
    if (next > first)
      add_range(out, first, next - 1);
    else
      ++range;
  }
  return out;
}

// Translates, and inserts callouts that check the deadline. A callout goes wherever one step of the matcher may cost as
// much as the text is long: before a repetition that a match may reach more than a few times, and into every repeated
// group. PCRE2's own limit counts steps, whatever their length.
class Translator {
 public:
  explicit Translator(std::string_view in) : in_(in) {}

  std::string run() {
    if (in_.size() > kMaxRegexBytes)
      fail("a regular expression of more than " + std::to_string(kMaxRegexBytes) + " bytes");
    while (at_ < in_.size()) {
      const char c = in_[at_];
      if (c == '(') {
        open();
      } else if (c == ')') {
        if (groups_.empty()) fail("a ) without a (");
        atom_ = groups_.back().begin;
        inside_ = groups_.back().inside;
        groups_.pop_back();
        out_ += ")", ++at_;
        quantifier();
      } else if (c == '|') {
        out_ += "|", ++at_;
        if (groups_.empty()) repeats_ = 0;
      } else if (c == '^' || c == '$') {
        out_ += c, ++at_;
      } else {
        begin_atom();
        if (c == '[')
          set();
        else if (c == '\\')
          escape();
        else if (c == '*' || c == '+' || c == '?')
          fail("a quantifier with nothing before it");
        else if (c == '{' || c == '}')
          out_ += "\\" + literal();
        else
          out_ += literal();
        quantifier();
      }
    }
    if (!groups_.empty()) fail("a ( without a )");
    return std::move(out_);
  }

 private:
  struct Group {
    size_t begin, inside;  // in out_
  };
  [[noreturn]] void fail(const std::string& what) const { throw invalid(what); }
  std::string_view rest() const { return in_.substr(at_); }
  bool take(std::string_view text) {
    if (!rest().starts_with(text)) return false;
    at_ += text.size();
    return true;
  }
  // Takes one character that stands for itself.
  std::string literal() {
    const size_t bytes = size_t(next_code_point(rest()).bytes);
    at_ += bytes;
    return std::string(in_.substr(at_ - bytes, bytes));
  }

  void begin_atom() {
    constexpr int kAtomsBetweenCallouts = 32;
    if (++atoms_ % kAtomsBetweenCallouts == 0) out_ += "(?C)";
    atom_ = out_.size();
    inside_ = std::string::npos;
  }

  // Takes "(" and its kind. No group captures, since nothing may refer to it.
  void open() {
    const size_t begin = out_.size();
    if (take("(?=") || take("(?!") || take("(?<=") || take("(?<!") || take("(?>") || take("(?:") || take("(?i:") ||
        take("(?-i:")) {
      const size_t from = in_.rfind('(', at_ - 1);
      out_ += in_.substr(from, at_ - from);
    } else if (at_ == 0 && take("(?i)")) {
      out_ += "(?i)";
      return;
    } else if (rest().starts_with("(?") || rest().starts_with("(*")) {
      fail("the group " + std::string(rest().substr(0, 3)));
    } else {
      at_ += 1;
      out_ += "(?:";
    }
    groups_.push_back({begin, out_.size()});
  }

  // Takes the quantifier after an atom, if any: *, +, ? or {n,m}, then ? (lazy) or + (possessive).
  void quantifier() {
    bool interval = false, exact = false;
    int64_t least = 0, most = -1;  // -1: no bound
    std::string text;
    if (take("*")) {
      text = "*";
    } else if (take("+")) {
      text = "+";
    } else if (take("?")) {
      text = "?", most = 1;
    } else if (read_interval(least, most, exact)) {
      interval = true;
      text = "{" + std::to_string(least) + (exact ? "" : "," + (most < 0 ? "" : std::to_string(most))) + "}";
    } else {
      return;
    }
    const bool is_group = inside_ != std::string::npos, is_long = most < 0 || most > 64;
    // A match reaches the first repetition after at most two optional atoms at most four times.
    if (is_group) {
      out_.insert(inside_, "(?C)");
    } else if (is_long && (repeats_ > 2 || !groups_.empty())) {
      out_.insert(atom_, "(?C)");
      atom_ += 4;
    }
    repeats_ += is_group || is_long ? 3 : most == least ? 0 : 1;
    if (interval && take("+")) {  // Ruby's {n,m}+ repeats the repetition
      out_.insert(atom_, "(?:(?C)");
      out_ += text + ")+";
    } else if (exact && rest().starts_with("?")) {
      fail("{n}?");
    } else {
      if (take("?"))
        text += "?";
      else if (take("+"))
        text += "+";
      out_ += text;
    }
    const char next = at_ < in_.size() ? in_[at_] : 0;
    if (next == '*' || next == '+' || next == '?' || read_interval(least, most, exact))
      fail("a quantifier of a quantifier");
  }

  // Takes {n}, {n,}, {n,m} or {,m}.
  bool read_interval(int64_t& least, int64_t& most, bool& exact) {
    if (!rest().starts_with('{')) return false;
    const size_t end = in_.find('}', at_);
    if (end == in_.npos) return false;
    const std::string_view inside = in_.substr(at_ + 1, end - at_ - 1);
    const size_t comma = inside.find(',');
    const std::string_view a = inside.substr(0, comma), b = comma == inside.npos ? a : inside.substr(comma + 1);
    if (inside.find_first_not_of("0123456789,") != inside.npos || (a.empty() && b.empty())) return false;
    least = 0, most = -1, exact = comma == inside.npos;
    if ((!a.empty() && !read_number(a, least)) || (!b.empty() && !read_number(b, most)))
      fail("{" + std::string(inside) + "}");
    if (least > 1000 || most > 1000 || (most >= 0 && most < least)) fail("{" + std::string(inside) + "}");
    at_ = end + 1;
    return true;
  }

  // Takes [...]. `newer` comes first, where it forms no range with a neighbour.
  void set() {
    const size_t begin = at_++;
    const bool negated = take("^");
    std::string body, newer;
    for (bool first = true;; first = false) {
      if (at_ >= in_.size()) fail("a [ without a ]");
      if (rest().starts_with("]")) {
        if (first) fail("an empty [], or a ] as first character in it");
        break;
      }
      if (rest().starts_with("[") || rest().starts_with("&&"))
        fail("[ or && inside of " + std::string(in_.substr(begin, 60)));
      if (rest().starts_with("\\"))
        escape_in_set(body, newer);
      else
        body += literal();
    }
    ++at_;
    out_ += (negated ? "[^" : "[") + newer + body + "]";
  }

  // Takes the name of \p{Name} or \P{^Name}. Returns PCRE2's form, its newer characters, and whether it is negated.
  std::string property(std::string& newer, bool& negated) {
    negated = take("P");
    if (!negated) take("p");
    const size_t end = in_.find('}', at_);
    if (!take("{") || end == in_.npos) fail("\\p without {...}");
    if (take("^")) negated = !negated;
    const std::string name(in_.substr(at_, end - at_));
    at_ = end + 1;
    if (name.empty() || name.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_") != name.npos)
      fail("\\p{" + name + "}");
    if (kCategories.find(" " + name + " ") != kCategories.npos) {
      if (name[0] != 'Z' && name[0] != 'C') newer += newer_of(name);
      return "\\p{" + name + "}";
    }
    if (name == "Han")
      for (const Newer& range : kNewerHan) add_range(newer, range.first, range.last);
    return "\\p{sc:" + name + "}";  // without sc: PCRE2 would use script extensions
  }

  std::string newer_words() const { return newer_of("L") + newer_of("M") + newer_of("Nd") + newer_of("Nl"); }

  // Takes an escape that means one character, and returns PCRE2's form.
  std::string character(char c) {
    if (c == 'x' || c == 'u') {
      const bool braces = c == 'x' && take("{");
      const size_t end = braces ? in_.find('}', at_) : at_ + (c == 'x' ? 2 : 4);
      uint32_t value = 0;
      if (end > in_.size() || !read_number(in_.substr(at_, end - at_), value, 16) || value > 0x10ffff ||
          (c == 'x' && !braces && value >= 0x80))
        fail(std::string("the number of \\") + c);
      at_ = end + braces;
      return escape_of(value);
    }
    if (c == 'v') return "\\x{b}";
    if (std::string_view("nrtfae").find(c) != std::string_view::npos) return std::string("\\") + c;
    if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'))
      fail(std::string("the escape \\") + c);
    --at_;
    return uint8_t(c) < 0x80 ? "\\" + literal() : literal();
  }

  char after_backslash() {
    if (++at_ >= in_.size()) fail("a \\ at the end");
    return in_[at_];
  }

  void escape() {
    const char c = after_backslash();
    std::string newer;
    auto in_brackets = [&](bool negated, const std::string& body) {
      out_ += (negated ? "[^" : "[") + newer + body + "]";
    };
    if (c == 'p' || c == 'P') {
      bool negated = false;
      const std::string body = property(newer, negated);
      return in_brackets(negated, body);
    }
    ++at_;
    if (c == 's' || c == 'S') return in_brackets(c == 'S', kSpaces);
    if (c == 'd' || c == 'D') return newer = newer_of("Nd"), in_brackets(c == 'D', "\\p{Nd}");
    if (c == 'w' || c == 'W') return newer = newer_words() + kLatin1Numbers, in_brackets(c == 'W', kWords);
    if (c == 'A' || c == 'z' || c == 'Z')
      out_ += std::string("\\") + c;
    else
      out_ += character(c);
  }

  void escape_in_set(std::string& body, std::string& newer) {
    const char c = after_backslash();
    if (c == 'p' || c == 'P') {
      bool negated = false;
      body += property(newer, negated);
      if (negated) fail("\\P inside of []");
      return;
    }
    ++at_;
    if (c == 's')
      body += kSpaces;
    else if (c == 'S')
      body += "\\S", newer += "\\x{180e}";
    else if (c == 'd')
      body += "\\p{Nd}", newer += newer_of("Nd");
    else if (c == 'w')
      body += kWords, newer += newer_words();
    else
      body += character(c);
  }

  const std::string_view in_;
  size_t at_ = 0;
  std::string out_;
  std::vector<Group> groups_;                     // open groups
  size_t atom_ = 0, inside_ = std::string::npos;  // begin of the last atom; begin of a group's inside
  int atoms_ = 0, repeats_ = 0;  // atoms so far; weight of repetitions since the last | outside of groups
};

}  // namespace

namespace pcre2 {  // named, because Matching and Regex hold these

inline double seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// Processor time of this thread. The coarse clock is nearly free and tells when to read the exact one.
class Deadline {
 public:
  explicit Deadline(double allowed_s)
      : allowed_s_(allowed_s), begin_s_(seconds(CLOCK_THREAD_CPUTIME_ID)), look_at_(coarse() + allowed_s) {}
  bool passed() {
    if (coarse() < look_at_) return false;
    const double left = allowed_s_ - (seconds(CLOCK_THREAD_CPUTIME_ID) - begin_s_);
    look_at_ = coarse() + left;
    return left <= 0;
  }

 private:
  static double coarse() { return seconds(CLOCK_MONOTONIC_COARSE); }
  const double allowed_s_, begin_s_;
  double look_at_;
};

inline int callout(pcre2_callout_block*, void* deadline) {
  return static_cast<Deadline*>(deadline)->passed() ? PCRE2_ERROR_CALLOUT : 0;
}

struct Free {
  void operator()(pcre2_code* p) const { pcre2_code_free(p); }
  void operator()(pcre2_compile_context* p) const { pcre2_compile_context_free(p); }
  void operator()(pcre2_match_context* p) const { pcre2_match_context_free(p); }
  void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
  void operator()(pcre2_jit_stack* p) const { pcre2_jit_stack_free(p); }
};
template <class T>
using Held = std::unique_ptr<T, Free>;

inline PCRE2_SPTR units(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

}  // namespace pcre2

std::string pcre2_of(std::string_view oniguruma) { return Translator(oniguruma).run(); }

std::string escaped_regex(std::string_view text) {
  std::string out;
  for (char c : text) {
    if (std::string_view("\\^$.|?*+()[]{}").find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

// Ordinary text takes some 20 ns a byte at worst.
struct Matching::State {
  explicit State(size_t bytes)
      : deadline(0.25 + 1e-6 * double(bytes)),
        stack(pcre2_jit_stack_create(32 << 10, 512 << 10, nullptr)),
        data(pcre2_match_data_create(1, nullptr)),
        context(pcre2_match_context_create(nullptr)) {
    if (!stack || !data || !context) throw std::bad_alloc();
    pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
    pcre2_set_callout(context.get(), pcre2::callout, &deadline);
    // Backtracking from the end of a long run of spaces takes one step per space.
    pcre2_set_match_limit(context.get(), uint32_t(std::min<size_t>(1'000'000 + 4 * bytes, UINT32_MAX)));
    pcre2_set_heap_limit(context.get(), 64 << 10);  // KiB, of the interpreter
  }
  pcre2::Deadline deadline;
  pcre2::Held<pcre2_jit_stack> stack;
  pcre2::Held<pcre2_match_data> data;
  pcre2::Held<pcre2_match_context> context;
};

Matching::Matching(size_t text_bytes) : state_(std::make_unique<State>(text_bytes)) {}
Matching::~Matching() = default;

struct Regex::Code {
  pcre2::Held<pcre2_code> compiled;
  bool jit = false;
};

Regex::Regex(std::string_view oniguruma, std::string where)
    : code_(std::make_unique<Code>()), where_(std::move(where)) {
  std::string pattern;
  try {
    pattern = pcre2_of(oniguruma);
  } catch (const Error& error) {
    throw invalid(where_ + ": " + error.message + " is not supported in a regex");
  }
  const pcre2::Held<pcre2_compile_context> context(pcre2_compile_context_create(nullptr));
  if (!context) throw std::bad_alloc();
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  pcre2_set_parens_nest_limit(context.get(), 100);
  int error = 0;
  size_t at = 0;
  // Ruby's ^ and $ match at lines. A match is anchored to one place; cut() moves on.
  code_->compiled.reset(pcre2_compile(pcre2::units(pattern), pattern.size(),
                                      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_ANCHORED, &error, &at,
                                      context.get()));
  if (!code_->compiled) {
    char text[256];
    pcre2_get_error_message(error, reinterpret_cast<PCRE2_UCHAR*>(text), sizeof text);
    throw invalid(where_ + ": this is not a valid regular expression: " + text);
  }
  code_->jit = pcre2_jit_compile(code_->compiled.get(), PCRE2_JIT_COMPLETE) == 0;  // else it is interpreted
}

Regex::~Regex() = default;

size_t Regex::match_at(std::string_view text, size_t at, Matching& matching) const {
  const pcre2_code* code = code_->compiled.get();
  Matching::State& state = *matching.state_;
  int found = PCRE2_ERROR_JIT_STACKLIMIT;
  if (code_->jit)
    found = pcre2_jit_match(code, pcre2::units(text), text.size(), at, 0, state.data.get(), state.context.get());
  if (found == PCRE2_ERROR_JIT_STACKLIMIT)
    found = pcre2_match(code, pcre2::units(text), text.size(), at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, state.data.get(),
                        state.context.get());
  if (found == PCRE2_ERROR_NOMATCH && !state.deadline.passed()) return std::string_view::npos;
  if (found < 0 || state.deadline.passed())
    throw invalid(where_ + ": the regular expression takes too much time or memory on a text of " +
                  std::to_string(text.size()) + " bytes");
  return pcre2_get_ovector_pointer(state.data.get())[1];
}

void Regex::cut(std::string_view text, Matching& matching, std::vector<Piece>& out) const {
  out.clear();
  if (text.empty()) return;
  size_t done = 0;
  bool any = false;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = match_at(text, at, matching);
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

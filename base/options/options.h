// The options table: one row per option with name, default, unit, range, help and the field that it sets. It parses the
// command line and --config FILE (INI), prints the manual, the header of every run and of every result file.
//
// An option is a row and a field: sets<&EngineOptions::max_batch> in the row, and whoever has an
// EngineOptions lets fill() set it, and all its other fields that have a row.
//
// Thread safety: const after parse.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/status.h"

namespace xpyd {

// Bounds that rows of several tables have.
inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr double kMaxTokens = 1 << 24;  // of one sequence: beyond any model, far from overflow
inline constexpr double kMaxSeed = double(1ll << 53);

enum class OptionKind : uint8_t { text, choice, integer, number, bytes, flag };

class Options;

// Where a row's value goes: to a field of a struct, named by an address that no other struct has.
struct OptionTarget {
  const void* type = nullptr;
  void (*set)(void* object, const Options& options, const char* name) = nullptr;
};
template <class T>
inline constexpr char kStructTag = 0;

struct OptionRow {
  const char* name;  // "kv-bytes", without dashes
  OptionKind kind;
  const char* default_value;  // as a user would type it; flags: "off"
  const char* unit;           // "tokens", "bytes", "s", "" …; "secret": never printed
  const char* choices;        // choice: "a|b|c"; text: what to type ("FILE"), only for the manual
  double min, max;            // integer, number, bytes; a number may be "inf" where max is infinite
  const char* help;           // one line; error messages quote it
  const char* group;          // subcommands that take it, space separated: "serve generate bench"
  OptionTarget to = {};       // none: read by its name
  const char* also = "";      // what other programs call it, space separated: answered, not taken
};

// Values of one run: every row of the group, checked.
class Options {
 public:
  // Parses `arguments` (after the subcommand). A bad one is an error whose message names the option, what was expected,
  // and for an unknown name the nearest valid one. Positional arguments are kept in order. When the group has a row
  // "config", the INI file that it names is read too; the command line wins over it, and on the command line the last
  // of several wins. Below both, a row "kv-bytes" has the environment's XPYD_KV_BYTES. The rows' strings must outlive
  // the object.
  static Result<Options> parse(std::span<const OptionRow> table, std::string_view group,
                               const std::vector<std::string>& arguments, int max_positional);

  // Asking for an unknown name is a bug: aborts.
  const std::string& text(std::string_view name) const;
  int64_t integer(std::string_view name) const;  // integer and bytes
  double number(std::string_view name) const;
  bool flag(std::string_view name) const;   // flag, and a choice of on|off
  int choice(std::string_view name) const;  // the place of a choice among its row's: an enum of the same order
  bool given(std::string_view name) const;  // anywhere, and not by default
  // Sets the fields of `object` that rows of the group name.
  template <class T>
  void fill(T& object) const {
    fill(&kStructTag<T>, &object);
  }
  const std::vector<std::string>& positional() const { return positional_; }
  const std::vector<OptionRow>& rows() const { return rows_; }  // of the group

  // "--name value  # unit" per line, defaults included, in the table's order; a secret shows as
  // "***". `changed`: of those alone that differ from their defaults.
  std::string table(bool changed = false) const;
  // As typed, or the default. Secrets are in clear: a result file takes shown_values().
  const std::map<std::string, std::string, std::less<>>& values() const { return values_; }
  std::map<std::string, std::string> shown_values() const;

 private:
  void fill(const void* type, void* object) const;
  std::vector<OptionRow> rows_;  // of the group
  std::map<std::string, std::string, std::less<>> values_;
  std::map<std::string, bool, std::less<>> given_;
  std::vector<std::string> positional_;
};

// "a,b" -> a, b; empty parts are dropped.
std::vector<std::string> comma_list(std::string_view text);

template <class T>
T option_value(const Options& options, const char* name) {
  if constexpr (std::is_same_v<T, bool>)
    return options.flag(name);
  else if constexpr (std::is_enum_v<T>)
    return static_cast<T>(options.choice(name));
  else if constexpr (std::is_integral_v<T>)
    return static_cast<T>(options.integer(name));
  else if constexpr (std::is_floating_point_v<T>)
    return static_cast<T>(options.number(name));
  else if constexpr (std::is_same_v<T, std::vector<std::string>>)
    return comma_list(options.text(name));
  else
    return options.text(name);
}

template <class T, class Field>
T struct_of(Field T::*);

// A row's target: a field, or one of a field: sets<&ClusterOptions::kv, &KvOptions::block_tokens>.
template <auto first, auto... rest>
inline constexpr OptionTarget sets = {
    &kStructTag<decltype(struct_of(first))>, [](void* object, const Options& options, const char* name) {
      auto& field = ((static_cast<decltype(struct_of(first))*>(object)->*first).*....*rest);
      field = option_value<std::remove_reference_t<decltype(field)>>(options, name);
    }};
// … which becomes what `convert` makes of the text.
template <auto convert, auto first, auto... rest>
inline constexpr OptionTarget sets_as = {
    &kStructTag<decltype(struct_of(first))>, [](void* object, const Options& options, const char* name) {
      ((static_cast<decltype(struct_of(first))*>(object)->*first).*....*rest) = convert(options.text(name));
    }};
// … whether it is that word: sets_as<is<"pull">, &DisaggOptions::pull>.
template <size_t n>
struct OptionWord {
  char text[n];
  consteval OptionWord(const char (&word)[n]) { std::copy_n(word, n, text); }
};
template <OptionWord word>
bool is(const std::string& value) {
  return value == word.text;
}

// One paragraph per option of the group, wrapped at 100 columns.
std::string options_manual(std::span<const OptionRow> table, std::string_view group);

// "512MiB", "1.5GB", "65536" -> bytes. MiB = 2^20, MB = 10^6. A fraction must come out whole.
Result<int64_t> parse_bytes(std::string_view text);

// The candidate with the fewest edits (insert, delete, replace, swap of neighbours), at most one
// for three characters; one that begins with `name` comes first. "": nothing is near.
std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates);
// "; nearest: '--kv-bytes'", or "".
std::string nearest_hint(std::string_view name, const std::vector<std::string>& candidates,
                         const std::string& dashes = "");

}  // namespace xpyd

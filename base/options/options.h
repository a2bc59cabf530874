// The options table: one row per option with name, default, unit, range, help and the field that it sets. It parses the
// command line and --config FILE (INI), and prints the manual and the header of every run and of every result file. It
// checks each value alone. Code that reads the values checks what options require of each other (server/build.cc).
//
// An option is a row and a field: the row has sets<&EngineOptions::max_batch>. Options::fill(engine_options) sets this
// field and all others of the struct that have a row.
//
// Thread safety: const after parse().
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

// The field to which a row's value goes. The struct is identified by an address that no other struct has.
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
  const char* unit;           // "tokens", "bytes", "" …; a "secret" is never printed
  const char* choices;        // choice: "a|b|c"; text: what to type ("FILE"), for the manual only
  double min, max;            // integer, number, bytes; a number may be "inf" if max is infinite
  const char* help;           // one line; error messages quote it
  const char* group;          // subcommands that take it, separated by spaces: "serve generate bench"
  OptionTarget to = {};       // none: callers read it by its name
};

// The checked values of one run: every row of the group.
class Options {
 public:
  // Parses `arguments` (without the subcommand): "--name value", "--name=value", or "--name" for a flag; after "--" all
  // are positional and kept in order. A bad argument or a missing value is an error that names the option and what was
  // expected. If the group has a row "config", the INI file that it names is read, too. The command line wins over the
  // file, and on the command line the last of several wins. Below both, the environment's XPYD_NAME of a row, such as
  // XPYD_KV_BYTES, applies. The rows' strings must outlive the object.
  static Result<Options> parse(std::span<const OptionRow> table, std::string_view group,
                               const std::vector<std::string>& arguments, int max_positional);

  // Each requires a name of the group, else it aborts.
  const std::string& text(std::string_view name) const;
  int64_t integer(std::string_view name) const;  // integer and bytes
  double number(std::string_view name) const;
  bool flag(std::string_view name) const;   // a flag, or a choice of on|off
  int choice(std::string_view name) const;  // the index of the choice in its row, for an enum of the same order
  bool given(std::string_view name) const;  // given by command line, file or environment
  // Sets the fields of `object` that rows of the group name.
  template <class T>
  void fill(T& object) const {
    fill(&kStructTag<T>, &object);
  }
  const std::vector<std::string>& positional() const { return positional_; }
  const std::vector<OptionRow>& rows() const { return rows_; }  // of the group

  // One line "--name value  # unit" per option, defaults included, in the order of the table; a secret is "***".
  // `changed`: only options that differ from their defaults.
  std::string table(bool changed = false) const;
  // Values as typed, or defaults. Secrets are in clear text, so result files use shown_values().
  const std::map<std::string, std::string, std::less<>>& values() const { return values_; }
  std::map<std::string, std::string> shown_values() const;

 private:
  void fill(const void* type, void* object) const;
  std::vector<OptionRow> rows_;  // the rows of the group
  std::map<std::string, std::string, std::less<>> values_;
  std::map<std::string, bool, std::less<>> given_;
  std::vector<std::string> positional_;
};

// Splits "a,b" into a and b; empty parts are dropped.
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

// A row's target: a field, or a field of a field, as in sets<&ClusterOptions::kv, &KvOptions::block_tokens>.
template <auto first, auto... rest>
inline constexpr OptionTarget sets = {
    &kStructTag<decltype(struct_of(first))>, [](void* object, const Options& options, const char* name) {
      auto& field = ((static_cast<decltype(struct_of(first))*>(object)->*first).*....*rest);
      field = option_value<std::remove_reference_t<decltype(field)>>(options, name);
    }};
// A target that gets `convert(text)`.
template <auto convert, auto first, auto... rest>
inline constexpr OptionTarget sets_as = {
    &kStructTag<decltype(struct_of(first))>, [](void* object, const Options& options, const char* name) {
      ((static_cast<decltype(struct_of(first))*>(object)->*first).*....*rest) = convert(options.text(name));
    }};
// A conversion for sets_as: whether the text is one word, as in sets_as<is<"pull">, &DisaggOptions::pull>.
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

// Parses "512MiB", "1.5GB" or "65536" to bytes. MiB = 2^20, MB = 10^6. A fraction must give whole bytes.
Result<int64_t> parse_bytes(std::string_view text);

}  // namespace xpyd

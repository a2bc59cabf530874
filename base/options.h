// The options table: one row per option with name, default, unit, range and help. It parses the command
// line and --config FILE (INI), prints the manual, the header of every run and of every result file.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace xpyd {

enum class OptionKind : uint8_t { text, choice, integer, number, bytes, flag };

struct OptionRow {
  const char* name;           // "kv-bytes", without dashes
  OptionKind kind;
  const char* default_value;  // as a user would type it
  const char* unit;           // "tokens", "bytes", "s", "" …
  const char* choices;        // choice: "a|b|c"
  double min, max;            // integer, number, bytes
  const char* help;           // one line
  const char* group;          // subcommands that take it, space separated: "serve generate bench"
};

// Values of one run: every row of the group, checked.
class Options {
 public:
  // Parses `arguments` (after the subcommand). A bad one is an error whose message names the option, what was
  // expected, and for an unknown name the nearest valid one. Positional arguments are kept in order.
  static Result<Options> parse(std::span<const OptionRow> table, std::string_view group,
                               const std::vector<std::string>& arguments, int max_positional);

  const std::string& text(std::string_view name) const;  // asking for an unknown name is a bug: aborts
  int64_t integer(std::string_view name) const;           // integer and bytes
  double number(std::string_view name) const;
  bool flag(std::string_view name) const;
  bool given(std::string_view name) const;                // on the command line or in the file
  const std::vector<std::string>& positional() const { return positional_; }

  std::string table() const;  // "--name value  # unit" per line, defaults included
  const std::map<std::string, std::string, std::less<>>& values() const { return values_; }

 private:
  std::map<std::string, std::string, std::less<>> values_;
  std::map<std::string, bool, std::less<>> given_;
  std::vector<std::string> positional_;
};

std::string options_manual(std::span<const OptionRow> table, std::string_view group);
// "512MiB", "1.5GB", "65536" -> bytes. MiB = 2^20, MB = 10^6.
Result<int64_t> parse_bytes(std::string_view text);
std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace xpyd

// The options table: one row per option with name, default, unit, range and help. It parses the
// command line and --config FILE (INI), prints the manual, the header of every run and of every
// result file.
//
// Thread safety: const after parse.
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
  const char* name;  // "kv-bytes", without dashes
  OptionKind kind;
  const char* default_value;  // as a user would type it; flags: "off"
  const char* unit;           // "tokens", "bytes", "s", "" …; "secret": never printed
  const char* choices;        // choice: "a|b|c"; text: what to type ("FILE"), only for the manual
  double min, max;            // integer, number, bytes; a number may be "inf" where max is infinite
  const char* help;           // one line; error messages quote it
  const char* group;          // subcommands that take it, space separated: "serve generate bench"
  const char* also = "";      // what other programs call it, space separated: answered, not taken
};

// Values of one run: every row of the group, checked.
class Options {
 public:
  // Parses `arguments` (after the subcommand). A bad one is an error whose message names the
  // option, what was expected, and for an unknown name the nearest valid one. Positional arguments
  // are kept in order. When the group has a row "config", the INI file that it names is read too;
  // the command line wins over it, and on the command line the last of several wins. Below both,
  // a row "kv-bytes" has the environment's XPYD_KV_BYTES. The rows' strings must outlive the
  // object.
  static Result<Options> parse(std::span<const OptionRow> table, std::string_view group,
                               const std::vector<std::string>& arguments, int max_positional);

  // Asking for an unknown name is a bug: aborts.
  const std::string& text(std::string_view name) const;
  int64_t integer(std::string_view name) const;  // integer and bytes
  double number(std::string_view name) const;
  bool flag(std::string_view name) const;   // flag, and a choice of on|off
  bool given(std::string_view name) const;  // anywhere, and not by default
  const std::vector<std::string>& positional() const { return positional_; }

  // "--name value  # unit" per line, defaults included, in the table's order; a secret shows as
  // "***".
  std::string table() const;
  // As typed, or the default. Secrets are in clear: a result file takes shown_values().
  const std::map<std::string, std::string, std::less<>>& values() const { return values_; }
  std::map<std::string, std::string> shown_values() const;

 private:
  std::vector<OptionRow> rows_;  // of the group
  std::map<std::string, std::string, std::less<>> values_;
  std::map<std::string, bool, std::less<>> given_;
  std::vector<std::string> positional_;
};

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

// Boost.Program_options splits the INI file into names and strings. The rows of the table check the strings here, so
// that all sources give the same messages.
#include "base/options/options.h"

#include <boost/program_options.hpp>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "base/json/json.h"
#include "base/numbers.h"
#include "base/table.h"

namespace xpyd {
namespace {

namespace po = boost::program_options;

constexpr size_t kMaxConfigBytes = 1u << 20;

// Empty parts are dropped.
std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    size_t end = std::min(text.find(separator), text.size());
    if (end > 0) parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

bool in_group(const OptionRow& row, std::string_view group) {
  auto groups = split(row.group, ' ');
  return std::find(groups.begin(), groups.end(), group) != groups.end();
}

std::string in_quotes(std::string_view text) { return "'" + std::string(text) + "'"; }

std::string show(double x) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.16g", x);
  return buffer;
}

std::string range_words(const OptionRow& row) {
  std::string unit = *row.unit ? " " + std::string(row.unit) : "";
  if (std::isinf(row.max)) return "at least " + show(row.min) + unit;
  return "from " + show(row.min) + " to " + show(row.max) + unit;
}

bool parse_number(std::string_view text, double* out) { return read_number(text, *out) && !std::isnan(*out); }

// Returns "" if `value` fits the row, and brings it to canonical form; otherwise what was expected.
std::string problem(const OptionRow& row, std::string& value) {
  switch (row.kind) {
    case OptionKind::text: return "";
    case OptionKind::choice: {
      auto choices = split(row.choices, '|');
      if (std::find(choices.begin(), choices.end(), value) != choices.end()) return "";
      return "expected " + std::string(row.choices);
    }
    case OptionKind::flag: {
      static const std::vector<std::string> on = {"on", "true", "yes", "1"}, off = {"off", "false", "no", "0"};
      bool is_on = std::find(on.begin(), on.end(), value) != on.end();
      if (!is_on && std::find(off.begin(), off.end(), value) == off.end()) return "expected on|off";
      value = is_on ? "on" : "off";
      return "";
    }
    case OptionKind::integer: {
      int64_t x = 0;
      const auto beyond = [&] { return row.max < 0x1p63 && x > int64_t(row.max); };  // double(2^53 + 1) is 2^53
      if (read_number(value, x) && double(x) >= row.min && !beyond()) return "";
      return "expected a whole number " + range_words(row);
    }
    case OptionKind::number: {
      double x = 0;
      if (parse_number(value, &x) && x >= row.min && x <= row.max) return "";
      return "expected a number " + range_words(row);
    }
    case OptionKind::bytes: {
      auto x = parse_bytes(value);
      if (!x) return x.error().message.substr(in_quotes(value).size() + 2);
      if (double(x.value()) >= row.min && double(x.value()) <= row.max) return "";
      return "expected a size " + range_words(row);
    }
  }
  return "";
}

std::string unknown_option(std::string name, const std::string& where) {
  for (int i = 0; i < 2 && !name.empty() && name[0] == '-'; ++i) name.erase(0, 1);
  name.erase(std::min(name.find('='), name.size()));
  return where + "unknown option '--" + name + "'";
}

struct Assignment {
  const OptionRow* row;
  std::string value;
};

struct CommandLine {
  std::vector<Assignment> assignments;  // in the order given
  std::vector<std::string> positional;
};

struct Parser {
  std::span<const OptionRow> table;
  std::string_view group;
  po::options_description description;

  Parser(std::span<const OptionRow> rows, std::string_view group_name) : table(rows), group(group_name) {
    for (const OptionRow& row : table) {
      if (!in_group(row, group)) continue;
      description.add_options()(row.name, po::value<std::string>(), row.help);
    }
  }

  const OptionRow* find(std::string_view name) const {
    for (const OptionRow& row : table)
      if (row.name == name && in_group(row, group)) return &row;
    return nullptr;
  }

  bool names_option(std::string_view word) const {
    return word.starts_with("--") && find(word.substr(2, word.find('=') - 2));
  }

  // `where` is "" or "FILE: "; `dashes` is "--" or "". Here and below, a value that does not fit is thrown as an Error.
  void check(std::vector<Assignment>& assignments, const std::string& where, const std::string& dashes) const {
    for (auto& [row, value] : assignments) {
      std::string given = value, why = problem(*row, value);
      std::string shown = std::strcmp(row->unit, "secret") == 0 ? "this value" : in_quotes(given);
      if (!why.empty())
        throw invalid(where + dashes + row->name + ": " + shown + " is not valid: " + why + " (" + row->help + ")");
    }
  }

  // Boost's own parser refuses "--name=" and takes "--seed" for the prompt of "--prompt --seed 1".
  CommandLine command_line(const std::vector<std::string>& words) const {
    CommandLine result;
    bool after_dashes = false;
    for (size_t i = 0; i < words.size(); ++i) {
      const std::string& word = words[i];
      if (!after_dashes && word == "--") {
        after_dashes = true;
      } else if (after_dashes || word.size() < 2 || word[0] != '-') {
        result.positional.push_back(word);
      } else if (!names_option(word)) {
        throw invalid(unknown_option(word, ""));
      } else {
        const size_t equals = word.find('=');
        const OptionRow* row = find(word.substr(2, equals - 2));
        if (equals == word.npos && row->kind != OptionKind::flag &&
            (i + 1 == words.size() || names_option(words[i + 1])))
          throw invalid(word + ": expected a value (" + row->help + ")");
        const bool flag = row->kind == OptionKind::flag;
        result.assignments.push_back({row, equals != word.npos ? word.substr(equals + 1) : flag ? "on" : words[++i]});
      }
    }
    return result;
  }

  std::vector<Assignment> environment() const {
    std::vector<Assignment> result;
    for (const OptionRow& row : table) {
      std::string name = std::string("XPYD_") + row.name;
      for (char& c : name) c = c == '-' ? '_' : char(std::toupper(static_cast<unsigned char>(c)));
      const char* value = in_group(row, group) ? std::getenv(name.c_str()) : nullptr;
      if (value) result.push_back({&row, value});
    }
    return result;
  }

  std::vector<Assignment> file(const std::string& path) const {
    std::istringstream stream(need(read_small_file(path, kMaxConfigBytes), "--config: "));
    std::vector<Assignment> result;
    try {
      auto parsed = po::parse_config_file(stream, description, /*allow_unregistered=*/true);
      for (const auto& option : parsed.options) {
        const OptionRow* row = find(option.string_key);
        if (!row && option.string_key.find('.') != std::string::npos)
          throw invalid(path + ": '" + option.string_key + "': expected options without a [section] above them");
        if (!row) throw invalid(unknown_option(option.string_key, path + ": "));
        if (option.string_key == "config")
          throw invalid(path + ": config: a configuration file cannot include another one");
        for (const Assignment& earlier : result)
          if (earlier.row == row) throw invalid(path + ": " + row->name + " is given twice");
        result.push_back({row, option.value.empty() ? "" : option.value.front()});
      }
    } catch (const po::error& error) {
      throw invalid(path + ": expected lines of the form `name = value`, and comments after #: " + error.what());
    }
    return result;
  }
};

}  // namespace

Result<Options> Options::parse(std::span<const OptionRow> table, std::string_view group,
                               const std::vector<std::string>& arguments, int max_positional) try {
  Parser parser(table, group);
  CommandLine typed = parser.command_line(arguments);
  parser.check(typed.assignments, "", "--");
  if (int(typed.positional.size()) > max_positional)
    return invalid("unexpected argument " + in_quotes(typed.positional[size_t(max_positional)]) + ": " +
                   std::string(group) + " takes " +
                   (max_positional == 0   ? "none"
                    : max_positional == 1 ? "at most one"
                                          : "at most " + std::to_string(max_positional)) +
                   " beside its options");

  Options options;
  for (const OptionRow& row : table) {
    if (!in_group(row, group)) continue;
    std::string value = row.default_value, why = problem(row, value);
    XPYD_CHECK(why.empty(), std::string("default of --") + row.name + ": " + why);
    XPYD_CHECK(options.values_.emplace(row.name, value).second, row.name);
    options.rows_.push_back(row);
  }
  auto set = [&](const Assignment& assignment) {
    options.values_[assignment.row->name] = assignment.value;
    options.given_[assignment.row->name] = true;
  };
  std::vector<Assignment> environment = parser.environment();
  parser.check(environment, "XPYD_* in the environment: ", "");
  for (const Assignment& assignment : environment) set(assignment);
  std::string config;
  for (const auto* given : {&environment, &typed.assignments})
    for (const Assignment& assignment : *given)
      if (std::strcmp(assignment.row->name, "config") == 0) config = assignment.value;
  if (!config.empty()) {
    std::vector<Assignment> file = parser.file(config);
    parser.check(file, config + ": ", "");
    for (const Assignment& assignment : file) set(assignment);
  }
  for (const Assignment& assignment : typed.assignments) set(assignment);
  options.positional_ = std::move(typed.positional);
  return options;
} catch (const Error& error) {
  return error;
}

const std::string& Options::text(std::string_view name) const {
  auto found = values_.find(name);
  XPYD_CHECK(found != values_.end(), "no option --" + std::string(name));
  return found->second;
}

int64_t Options::integer(std::string_view name) const {
  const std::string& value = text(name);
  int64_t x = 0;
  if (read_number(value, x)) return x;
  auto bytes = parse_bytes(value);
  XPYD_CHECK(bytes.ok(), "--" + std::string(name) + " is not an integer option");
  return bytes.value();
}

double Options::number(std::string_view name) const {
  double x = 0;
  XPYD_CHECK(parse_number(text(name), &x), "--" + std::string(name) + " is not a number option");
  return x;
}

bool Options::flag(std::string_view name) const {
  const std::string& value = text(name);
  XPYD_CHECK(value == "on" || value == "off", "--" + std::string(name) + " is not a flag");
  return value == "on";
}

int Options::choice(std::string_view name) const {
  const OptionRow* row = find_row(rows_, name);
  XPYD_CHECK(row && row->kind == OptionKind::choice, "--" + std::string(name) + " is not a choice");
  const std::vector<std::string> choices = split(row->choices, '|');
  return int(std::find(choices.begin(), choices.end(), text(name)) - choices.begin());
}

bool Options::given(std::string_view name) const {
  text(name);
  return given_.find(name) != given_.end();
}

void Options::fill(const void* type, void* object) const {
  for (const OptionRow& row : rows_)
    if (row.to.type == type) row.to.set(object, *this, row.name);
}

std::map<std::string, std::string> Options::shown_values() const {
  std::map<std::string, std::string> shown;
  for (const OptionRow& row : rows_) {
    const std::string& value = text(row.name);
    bool hide = std::strcmp(row.unit, "secret") == 0 && !value.empty();
    shown[row.name] = hide ? "***" : value;
  }
  return shown;
}

std::string Options::table(bool changed) const {
  auto shown = shown_values();
  std::string lines;
  for (const OptionRow& row : rows_) {
    const std::string& value = shown[row.name];
    if (changed && value == row.default_value) continue;
    std::string line = std::string("--") + row.name + " " + value;
    if (*row.unit) line += "  # " + std::string(row.unit);
    lines += line + "\n";
  }
  return lines;
}

std::string options_manual(std::span<const OptionRow> table, std::string_view group) {
  constexpr size_t kIndent = 8, kColumns = 100;
  std::string manual;
  for (const OptionRow& row : table) {
    if (!in_group(row, group)) continue;
    std::string head = std::string("  --") + row.name;
    switch (row.kind) {
      case OptionKind::choice: head += " " + std::string(row.choices); break;
      case OptionKind::text: head += " " + std::string(*row.choices ? row.choices : "TEXT"); break;
      case OptionKind::flag: break;
      case OptionKind::bytes: head += " SIZE"; break;
      default: head += " N";
    }
    std::string help = row.help;
    bool bounded = row.kind == OptionKind::integer || row.kind == OptionKind::number || row.kind == OptionKind::bytes;
    if (bounded) help += "; " + range_words(row);
    if (row.kind != OptionKind::flag) help += *row.default_value ? "; default " + std::string(row.default_value) : "";
    manual += head + "\n";
    std::string line(kIndent, ' ');
    for (const std::string& word : split(help, ' ')) {
      if (line.size() + 1 + word.size() > kColumns) {
        manual += line + "\n";
        line.assign(kIndent, ' ');
      }
      line += (line.size() > kIndent ? " " : "") + word;
    }
    manual += line + "\n";
  }
  return manual;
}

Result<int64_t> parse_bytes(std::string_view text) {
  auto expected = [&](const char* why) {
    return invalid(in_quotes(text) + ": " + why +
                   "; expected bytes such as 65536, 512MiB or 1.5GB (units B kB KiB MB MiB GB GiB TB TiB)");
  };
  static constexpr struct {
    const char* name;
    uint64_t bytes;
  } units[] = {{"", 1},
               {"B", 1},
               {"kB", 1000},
               {"KB", 1000},
               {"KiB", 1u << 10},
               {"MB", 1000000},
               {"MiB", 1u << 20},
               {"GB", 1000000000},
               {"GiB", 1u << 30},
               {"TB", 1000000000000},
               {"TiB", uint64_t{1} << 40}};
  const size_t end = std::min(text.find_first_not_of("0123456789."), text.size());
  double number = 0;
  if (!read_number(text.substr(0, end), number)) return expected("there is no number");
  for (const auto& unit : units) {
    if (text.substr(end) != unit.name) continue;
    const double bytes = number * double(unit.bytes);
    if (bytes != std::trunc(bytes)) return expected("this is not a whole number of bytes");
    if (bytes >= 0x1p63) return expected("the number is too large");
    return int64_t(bytes);
  }
  return expected("the unit is unknown");
}

std::vector<std::string> comma_list(std::string_view text) { return split(text, ','); }

}  // namespace xpyd

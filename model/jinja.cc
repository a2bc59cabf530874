#include "model/jinja.h"

#include <algorithm>

#include "model/jinja_eval.h"

namespace xpyd::jinja {

constexpr int kMaxRunDepth = 800;

Template::Template() = default;
Template::Template(Template&&) noexcept = default;
Template& Template::operator=(Template&&) noexcept = default;
Template::~Template() = default;

static Error error_of(const Fault& fault) {
  return invalid((fault.line > 0 ? "line " + std::to_string(fault.line) + ": " : "") + fault.what);
}

Result<Template> Template::parse(std::string_view source) try {
  if (source.size() > kMaxBytes) return invalid("a template of more than 1 MiB");
  std::vector<Token> tokens = lex(source);
  Template made;
  for (const Token& token : tokens)
    if (token.kind == Token::Kind::name || token.kind == Token::Kind::text) made.words_.push_back(token.text);
  made.block_ = jinja::parse(std::move(tokens));
  return made;
} catch (const Fault& fault) {
  return error_of(fault);
}

Result<Text> Template::render(std::vector<std::pair<std::string, Value>> variables, int64_t now_unix_s,
                              const Limits& limits) const try {
  Scope given{nullptr, std::move(variables)};
  Evaluator evaluator({limits.work, limits.output_bytes, kMaxRunDepth}, given, now_unix_s);
  return evaluator.render(*block_);
} catch (const Fault& fault) {
  return error_of(fault);
}

bool Template::mentions(std::string_view word) const {
  return std::find(words_.begin(), words_.end(), word) != words_.end();
}

}  // namespace xpyd::jinja

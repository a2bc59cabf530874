// Finds in a template's tree whether it iterates over the content of messages. It follows names through {% set %}, {%
// for %}, attributes of namespaces and arguments of macros, in any order.
#include <map>
#include <string>

#include "model/jinja/jinja_eval.h"

namespace xpyd::model::jinja {
namespace {

// What a value may be; several bits if it depends.
enum What : unsigned { kNothing = 0, kMessages = 1, kMessage = 2, kContent = 4 };

class ContentFinder {
 public:
  bool run(const Node& block) {
    known_["messages"] = kMessages;
    // Chains of names that are used before they are set need one round per name.
    constexpr int kRounds = 8;
    changed_ = true;
    for (int round = 0; round < kRounds && changed_ && !found_; ++round) {
      changed_ = false;
      walk(block);
    }
    return found_;
  }

 private:
  void add(const std::string& name, unsigned what) {
    unsigned& known = known_[name];
    changed_ |= (known | what) != known;
    known |= what;
  }
  unsigned known(const std::string& name) const {
    const auto at = known_.find(name);
    return at == known_.end() ? kNothing : at->second;
  }
  static std::string attribute_name(const Node& node) {
    return node.kids[0]->kind == Kind::name ? node.kids[0]->name + "." + node.name : "";
  }
  static bool is_content(const Node& node) {
    return node.kind == Kind::constant && node.value.text() && node.value.text()->bytes == "content";
  }

  unsigned of(const Node* node) const {
    if (!node) return kNothing;
    auto kid = [&](size_t i) { return i < node->kids.size() ? of(node->kids[i].get()) : kNothing; };
    switch (node->kind) {
      case Kind::name: return known(node->name);
      case Kind::attribute:
        return (node->name == "content" && kid(0) & kMessage ? kContent : kNothing) | known(attribute_name(*node));
      case Kind::item:
        if (is_content(*node->kids[1])) return kid(0) & kMessage ? kContent : kNothing;
        return kid(0) & kMessages ? kMessage : kNothing;
      case Kind::slice: return kid(0);
      case Kind::filter:
        if (among(" first last ", node->name)) return kid(0) & kMessages ? kMessage : kNothing;
        return among(" d default list map reject rejectattr select selectattr sort unique ", node->name) ? kid(0)
                                                                                                         : kNothing;
      case Kind::call: {  // message.get('content')
        const Node& callee = *node->kids[0];
        const bool gets = callee.kind == Kind::attribute && callee.name == "get" && node->kids.size() > 1;
        return gets && is_content(*node->kids[1]) && of(callee.kids[0].get()) & kMessage ? kContent : kNothing;
      }
      case Kind::binary:
        if (node->name == "+") return (kid(0) | kid(1)) & kMessages;
        return node->name == "or" || node->name == "and" ? kid(0) | kid(1) : kNothing;
      case Kind::conditional: return kid(0) | kid(2);
      default: return kNothing;
    }
  }

  void walk(const Node& node) {
    if (node.kind == Kind::set) {
      const Node& target = *node.kids[0];
      const std::string name = target.kind == Kind::attribute ? attribute_name(target) : target.name;
      if (!name.empty()) add(name, of(node.kids[1].get()));
      const Node& value = *node.kids[1];  // ns = namespace(content=...)
      if (value.kind == Kind::call && value.kids[0]->kind == Kind::name && value.kids[0]->name == "namespace")
        for (size_t i = 0; i < value.names.size(); ++i)
          if (!value.names[i].empty()) add(name + "." + value.names[i], of(value.kids[i + 1].get()));
    } else if (node.kind == Kind::for_loop) {
      const unsigned what = of(node.kids[1].get());
      found_ |= (what & kContent) != 0;
      if (node.kids[0]->kind == Kind::name && what & kMessages) add(node.kids[0]->name, kMessage);
    } else if (node.kind == Kind::filter && node.kids[0] && among(" map rejectattr selectattr ", node.name)) {
      found_ |= (of(node.kids[0].get()) & kContent) != 0;
    } else if (node.kind == Kind::macro) {
      macros_[node.name] = &node;
    } else if (node.kind == Kind::call && node.kids[0]->kind == Kind::name) {
      call(node);
    }
    for (const NodePtr& kid : node.kids)
      if (kid && !found_) walk(*kid);
  }

  void call(const Node& node) {
    const std::string& callee = node.kids[0]->name;
    for (size_t i = 0; i < node.names.size(); ++i) {
      const unsigned what = of(node.kids[i + 1].get());
      if (what == kNothing) continue;
      const auto macro = macros_.find(callee);
      if (macro == macros_.end()) {
        changed_ = true;  // its macro may come later
        continue;
      }
      const std::vector<std::string>& parameters = macro->second->names;
      if (!node.names[i].empty())
        add(node.names[i], what);
      else if (i < parameters.size())
        add(parameters[i], what);
    }
  }

  std::map<std::string, unsigned> known_;
  std::map<std::string, const Node*> macros_;
  bool changed_ = false, found_ = false;
};

}  // namespace

bool iterates_over_content(const Node& block) { return ContentFinder().run(block); }

}  // namespace xpyd::model::jinja

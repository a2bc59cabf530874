// Facts about boxes, houses, trains and tables, which the demo model finds in its context, and questions about them.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"

namespace xpyd::experiments {

struct DemoFacts {
  std::vector<std::pair<std::string, std::string>> known;  // key, value: "key of box 17", "amber"
  std::string text;                                        // "The key of box 17 is amber. …"
};

inline DemoFacts demo_facts(Random& random, int n) {
  struct Kind {
    const char *attribute, *thing;
    std::vector<const char*> values;
  };
  const Kind kinds[] = {{"key", "box", {"amber", "jade", "ruby", "pearl", "opal", "coral", "ivory", "onyx", "quartz"}},
                        {"owner", "house", {"Alice", "Bruno", "Carla", "David", "Elena", "Felix", "Grace", "Hugo"}},
                        {"city", "train", {"Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Prague", "Oslo"}},
                        {"drink", "table", {"tea", "coffee", "milk", "water", "juice", "cocoa", "cider", "ale"}}};
  DemoFacts facts;
  std::set<std::string> names;
  while (int(facts.known.size()) < n) {
    const Kind& kind = kinds[random.below(4)];
    const std::string what = std::string(kind.attribute) + " of " + kind.thing + " " +
                             std::to_string(1 + random.below(400));
    if (!names.insert(what).second) continue;
    facts.known.push_back({what, kind.values[random.below(kind.values.size())]});
    facts.text += "The " + what + " is " + facts.known.back().second + ". ";
  }
  return facts;
}

// A text of facts, followed by questions about them with their answers.
inline std::string facts_and_answers(Random& random, int n_facts, int n_questions) {
  const DemoFacts facts = demo_facts(random, n_facts);
  std::string text = facts.text;
  for (int i = 0; i < n_questions; ++i) {
    const auto& [what, value] = facts.known[random.below(facts.known.size())];
    text += "What is the " + what + "? The " + what + " is " + value + ". ";
  }
  return text;
}

}  // namespace xpyd::experiments

// xpyd replay, trace and explain: readings of an event log (disagg/event_log.h).
#include <cstdio>

#include "disagg/replay.h"
#include "disagg/trace_view.h"
#include "server/commands.h"

namespace xpyd::server {

Result<std::shared_ptr<EventLog>> open_event_log(const Options& options) {
  if (options.text("event-log").empty()) return std::shared_ptr<EventLog>();
  JsonText shown;
  shown.open('{');
  for (const auto& [name, value] : options.shown_values()) shown.add(name.c_str(), value);
  auto log = EventLog::create(options.text("event-log"), options.integer("event-log-bytes"), shown.close('}').take());
  if (!log) return Error{log.error().code, "--event-log: " + log.error().message};
  return std::shared_ptr<EventLog>(std::move(log).value());
}

int replay_main(const Options& options) {
  if (options.positional().empty()) return fail(" replay", invalid("expected the event log's FILE"));
  ReplayOptions again;
  for (auto [option, kind] : {std::pair{"placement", "place"},
                              {"admission", "admit"},
                              {"admission", "join"},
                              {"disagg", "order"},
                              {"batching", "plan"}})
    if (!options.text(option).empty()) again.instead[kind] = options.text(option);
  const auto counts = replay(options.positional()[0], again, [](const std::string& line, const std::string& answer) {
    std::printf("%s\n  now: %s\n", line.c_str(), answer.c_str());
  });
  if (!counts) return fail(" replay", counts.error());
  bool differs = false;
  for (const auto& [kind, count] : counts.value()) {
    std::fprintf(stderr, "%-8s %lld decisions, %lld differ", kind.c_str(), static_cast<long long>(count.decisions),
                 static_cast<long long>(count.differ));
    if (kind == "place" && count.decisions > 0)
      std::fprintf(stderr, ", regret ratio %.4f", count.regret / double(count.decisions));
    std::fprintf(stderr, "\n");
    differs |= count.differ > 0;
  }
  return differs ? 1 : 0;
}

int trace_main(const Options& options) {
  if (options.positional().empty()) return fail(" trace", invalid("expected the event log's FILE"));
  const Status written = write_trace(options.positional()[0], stdout);
  return written ? 0 : fail(" trace", written.error());
}

int explain_main(const Options& options) {
  if (options.positional().empty()) return fail(" explain", invalid("expected the event log's FILE"));
  const std::string& path = options.positional()[0];
  const int64_t number = options.integer("request");
  std::printf("%s\n", attribution_header().c_str());
  if (number < 0) {
    const Status read = each_life(path,
                                  [](const RequestLife& life) { std::printf("%s\n", attribution_row(life).c_str()); });
    return read ? 0 : fail(" explain", read.error());
  }
  const Result<RequestLife> life = find_life(path, uint64_t(number));
  if (!life) return fail(" explain", life.error());
  std::printf("%s\n", attribution_row(life.value()).c_str());
  return 0;
}

}  // namespace xpyd::server

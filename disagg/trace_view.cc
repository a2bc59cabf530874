#include "disagg/trace_view.h"

#include <map>
#include <optional>

#include "disagg/event_log.h"

namespace xpyd::disagg {
namespace {

using nlohmann::json;

template <class T>
T read(const json& line) {
  T x;
  JsonIn::Keep keep;
  JsonIn in(line, keep);
  columns(in, x);
  return x;
}

// Events of the trace format, one a line; times in microseconds.
class TraceWriter {
 public:
  explicit TraceWriter(std::FILE* out) : out_(out) {
    std::fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[", out_);
  }
  void end() { std::fputs("\n]}\n", out_); }

  // Processes by name; requests are one of them.
  int process(const std::string& name) {
    auto [at, fresh] = processes_.try_emplace(name, int(processes_.size()) + 1);
    if (fresh) {
      JsonText event;
      event.open('{')
          .add("ph", "M", "name", "process_name", "pid", at->second)
          .key("args")
          .object("name", name)
          .close('}');
      put(event);
    }
    return at->second;
  }
  template <class... Args>
  void span(int pid, uint64_t tid, const std::string& name, double begin_s, double end_s, const Args&... args) {
    if (end_s <= begin_s) return;
    JsonText event;
    event.open('{').add("ph", "X", "name", name, "pid", pid, "tid", tid, "ts", begin_s * 1e6, "dur",
                        (end_s - begin_s) * 1e6);
    if constexpr (sizeof...(args) > 0) event.key("args").object(args...);
    event.close('}');
    put(event);
  }
  template <class... Args>
  void counters(int pid, const char* name, double at_s, const Args&... args) {
    JsonText event;
    event.open('{').add("ph", "C", "name", name, "pid", pid, "ts", at_s * 1e6).key("args").object(args...).close('}');
    put(event);
  }
  // From one process's track to another's.
  void arrow(uint64_t id, int from, int to, double begin_s, double end_s) {
    for (bool begins : {true, false}) {
      JsonText event;
      event.open('{').add("ph", begins ? "s" : "f", "id", id, "name", "KV", "cat", "kv", "pid", begins ? from : to,
                          "tid", 0, "ts", (begins ? begin_s : end_s) * 1e6);
      if (!begins) event.add("bp", "e");
      event.close('}');
      put(event);
    }
  }

 private:
  void put(JsonText& event) {
    std::fputs(first_ ? "\n" : ",\n", out_);
    first_ = false;
    std::fputs(event.take().c_str(), out_);
  }
  std::FILE* out_;
  bool first_ = true;
  std::map<std::string, int> processes_;
};

void put_step(TraceWriter& trace, const StepLife& s) {
  const int pid = trace.process(s.instance);
  const char* name = s.tokens == 0 ? "decode" : s.decodes == 0 ? "prefill" : "mixed";
  const double ends_s = s.t + s.seconds;
  trace.span(pid, 0, name, s.t, ends_s, "steps", s.steps, "tokens", s.tokens, "decodes", s.decodes, "context",
             s.context);
  trace.counters(pid, "blocks", ends_s, "active", s.active, "cached", s.cached, "in_transfer", s.in_transfer, "free",
                 s.free);
  trace.counters(pid, "sequences", ends_s, "running", s.running, "waiting", s.waiting);
}

void put_request(TraceWriter& trace, const RequestLife& life) {
  const int pid = trace.process("requests");
  const Attribution a = attribute(life);
  double at = life.t;
  auto phase = [&](const char* name, double seconds) {
    trace.span(pid, life.request, name, at, at + seconds, "request", life.request);
    at += seconds;
  };
  phase("schedule", a.schedule), phase("fetch", a.fetch), phase("queue", a.queue), phase("prefill", a.prefill);
  const double sent_s = at;
  phase("transfer", a.transfer), phase("wait", a.wait);
  trace.span(pid, life.request, "decode", at, life.ended, "tokens", life.output, "finish", life.finish);
  if (life.joined > 0 && life.prefill != life.decode)
    trace.arrow(life.request, trace.process(life.prefill), trace.process(life.decode), sent_s, life.joined);
}

}  // namespace

Status write_trace(const std::string& path, std::FILE* out) {
  TraceWriter trace(out);
  const Status read_all = read_event_log(path, [&trace](const std::string&, const json& line) {
    const std::string kind = line.value("e", "");
    if (kind == "step") put_step(trace, read<StepLife>(line));
    if (kind == "request") put_request(trace, read<RequestLife>(line));
  });
  trace.end();
  return read_all;
}

Status each_life(const std::string& path, const std::function<void(const RequestLife& life)>& see) {
  return read_event_log(path, [&](const std::string&, const json& line) {
    if (line.value("e", "") == "request") see(read<RequestLife>(line));
  });
}

Result<RequestLife> find_life(const std::string& path, uint64_t request) {
  std::optional<RequestLife> found;
  const Status read_all = each_life(path, [&](const RequestLife& life) {
    if (life.request == request) found = life;
  });
  if (!read_all) return read_all.error();
  if (!found) return Error{ErrorCode::not_found, path + ": no request " + std::to_string(request) + " has ended"};
  return *found;
}

}  // namespace xpyd::disagg
